//! Tests of associations: a service, and simulated hosts connected to it.

mod admission;
mod changes;
mod cuts;
mod discovery;
mod dozing;
mod ends;
mod exchange;
mod fences;
mod keeping;
mod pairs;
mod power;
mod preemption;
mod refusals;
mod resets;
mod rig;
mod scarcity;
mod server;
mod write_cache;
