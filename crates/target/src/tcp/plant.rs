//! Bugs that were here once, to be put back by tests that have to find them.

use std::cell::Cell;

/// A bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plant {
    /// What FUSE says is looked at again when a command of fabrics is given its buffer, and a buffer may
    /// be shorter than the data that were asked for.
    Overwrite,
    /// The same, with commands whose data go to the host.
    Misdirected,
    /// A buffer that a half was given does not come back.
    Lost,
    /// A byte of data gives a host as much time again for all that it owes.
    Renewed,
}

impl Plant {
    pub(super) const ALL: [Self; 4] =
        [Self::Overwrite, Self::Misdirected, Self::Lost, Self::Renewed];
}

thread_local! {
    static PLANTED: Cell<Option<Plant>> = const { Cell::new(None) };
}

/// Whether this bug is there.
pub(super) fn is_planted(plant: Plant) -> bool {
    PLANTED.get() == Some(plant)
}

/// Does something with a bug in place.
pub(super) fn planted(plant: Plant, work: impl FnOnce()) {
    struct Removed;
    impl Drop for Removed {
        fn drop(&mut self) {
            PLANTED.set(None);
        }
    }
    PLANTED.set(Some(plant));
    let _removed = Removed;
    work();
}
