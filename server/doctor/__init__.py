"""`pointsman doctor`: what a start would come to on this machine, and what in its way is wrong."""
