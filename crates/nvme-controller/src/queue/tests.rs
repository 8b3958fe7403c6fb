//! A queue between a fake host and a fake block device, in simulated time.

mod effects;
mod endings;
mod fused;
mod refusals;
mod rig;
mod rings;
