"""The protocol as a small explicit-state model, checked exhaustively: `python -m tests.protocol_model`.

explorer        breadth-first search over any model: invariants, states that hang, shortest traces
data            what is in Redis and in processes, as immutable values
bounds          how large a configuration is; rules that can be switched off
scripts         the ten scripts, one function each, under their names: claiming, transitions (the others), queueing,
                serving (who could run a request: routes and numerics ids), retiring (whether a worker may go)
worker          one worker process: steps (lives, beat, commits), table, first_stage, last_stage, whole_model, handover
                (pages that leave it and are found again, tokens of devices that vary), retirement (it changes to
                another precision), departure
gateway         clients with a key or a session, gateways, ACCEPT again
surroundings    scheduler, deadline, cancellation, and everything that goes wrong
invariants      I1, I2, ... of docs/protocol.md
protocol        all of it in one configuration, as the explorer wants it
configurations  what is checked: bounds and faults
canonical       states that differ in names only are one

Time is not modelled: what a timer does may happen at any moment at which its condition holds, so every order of events
is tried. Tokens are the numbers 1, 2, 3...: the token at position p of an undisturbed run is p. A device that varies
may have p + 100 in its place.
"""
