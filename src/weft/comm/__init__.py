"""How bytes move: lanes, collectives and groups. Nothing above this room calls a c10d collective."""
