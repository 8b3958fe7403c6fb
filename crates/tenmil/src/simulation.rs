//! What `tenmil sim` is asked to do.

/// What `tenmil sim` is asked to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimOptions {
    /// How many seeds to run after the scripted scenarios.
    pub seeds: u64,
    /// The first of them.
    pub first_seed: u64,
    /// Run only scenarios whose name contains this, and no seeds.
    pub scenario: Option<String>,
    /// Name the scenarios and run none.
    pub list: bool,
    /// Plant a bug that must be found.
    pub canary: bool,
}
