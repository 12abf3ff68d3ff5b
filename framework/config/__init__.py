"""What a recipe may say, how it is composed from files and command line, and everything that can be wrong with it. No torch."""
