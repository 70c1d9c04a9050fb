# cmake -D PAGE=docs/reference/errors.md -D OUTPUT=file.inc -P embed_table.cmake
# The page as a list of C++ strings, one a line, so that `deep_ep doctor --explain` and the page cannot differ.
file(READ "${PAGE}" text)
string(REPLACE "\n" ")~~\",\nR\"~~(" text "${text}")
file(WRITE "${OUTPUT}" "R\"~~(${text})~~\",\n")
