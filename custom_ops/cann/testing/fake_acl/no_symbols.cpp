// Only the name of these libraries matters: the provider asks for them beside libascendcl.so.
