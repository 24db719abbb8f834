"""One question each: overload, recovery, a killed gateway, what finished requests take."""
