//! Both ends against the specification, against each other, and against peers that lie.

mod combinations;
mod cuts;
mod deadlines;
mod digests;
mod exact;
mod flow;
mod refusals;
mod rig;
