//! The benchmark `perf`, and experiments that reproduce published claims about storage stacks.
//!
//! | module | contents |
//! |---|---|
//! | [`perf`] | I/O workloads and their measurement |
//! | [`experiment`] | experiments with interleaved trials, and verdicts on their results |
//! | [`reproduce`] | the experiments of `tenmil reproduce`, and their report |
//! | [`balance`] | distribution of the submitting threads over cores during a run |

#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod balance;
pub mod experiment;
pub mod perf;
pub mod reproduce;
