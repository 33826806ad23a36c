"""Read and build graphs: values, constants, shapes, sizes. The toolbox of the rooms above."""
