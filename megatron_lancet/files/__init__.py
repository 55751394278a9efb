"""Files: records that are read and written, and writes that are whole or not at all."""
