# Writes OUTPUT, a C++ file with fw_sources(): the SHA-256 of what `sha256sum` prints of FILES (with commas between), sorted by name.
# framework/kernels/library.py makes the same of the sources beside it. A step of the build, so that it is never older than the objects.
string(REPLACE "," ";" FILES "${FILES}")
list(SORT FILES)
foreach(file IN LISTS FILES)
  file(SHA256 ${file} hash)
  string(APPEND listing "${hash}  ${file}\n")
endforeach()
string(SHA256 hash "${listing}")
file(WRITE ${OUTPUT} "#include \"framework_kernels.h\"\n\nconst char* fw_sources(void) { return \"${hash}\"; }\n")
