"""How weights move: schedules, update rules, averages."""
