//! Tests of both ends against the specification, against each other, and against misbehaving peers.

mod combinations;
mod cuts;
mod deadlines;
mod digests;
mod exact;
mod flow;
mod one_send;
mod refusals;
mod rig;
