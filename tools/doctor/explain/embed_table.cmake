# cmake -D PAGE=docs/reference/errors.md -D OUTPUT=file.inc -P embed_table.cmake
# The page as a list of C++ strings, one a line, so that `deep_ep doctor --explain` and the page cannot differ.
file(READ "${PAGE}" text)
# "[RDMA](rdma.md#x)" becomes "RDMA (docs/reference/rdma.md#x)"; a link within the page loses its address.
string(REGEX REPLACE "\\[([^]\n]*)\\]\\(#[^)\n]*\\)" "\\1" text "${text}")
string(REGEX REPLACE "\\[([^]\n]*)\\]\\(([^)\n]*)\\)" "\\1 (docs/reference/\\2)" text "${text}")
string(REPLACE "docs/reference/../../" "" text "${text}")
string(REPLACE "reference/../" "" text "${text}")
string(REPLACE "\n" ")~~\",\nR\"~~(" text "${text}")
file(WRITE "${OUTPUT}" "R\"~~(${text})~~\",\n")
