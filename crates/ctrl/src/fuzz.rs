//! A made-up host and medium, for tests and for the fuzz target of this crate.

pub(crate) mod host;
pub(crate) mod medium;
