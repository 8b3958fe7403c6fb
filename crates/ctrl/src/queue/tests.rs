//! A queue between a made-up host and a made-up medium, in simulated time.

mod effects;
mod endings;
mod fused;
mod refusals;
mod rig;
mod rings;
