"""Build, check and try what a release consists of: ``python -m release``.

Modules, in the order of the steps: ``building`` makes the source distribution and, from it, a wheel
for each platform with zig; ``checking`` looks into wheels; ``emulating`` builds the C++ tests for a
platform and runs them; ``trying`` installs wheels in environments without a compiler. The method is
in README.md of this folder.
"""
