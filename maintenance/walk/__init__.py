"""Does what README and the guides print, in a fresh environment and on a terminal."""
