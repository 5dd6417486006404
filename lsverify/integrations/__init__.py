"""lsverify inside other people's trainings: one module for each trainer."""
