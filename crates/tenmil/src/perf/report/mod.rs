//! What a run has found out, for people and for programs.

pub mod figures;
