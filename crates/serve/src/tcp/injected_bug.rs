//! Bugs of earlier versions, reintroduced by tests that must detect them.

use std::cell::Cell;

/// Reintroduced bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InjectedBug {
    /// FUSE is evaluated again when a Fabrics command receives its buffer, so a buffer may be
    /// shorter than the requested data.
    Overwrite,
    /// The same, with commands that send data to the host.
    Misdirected,
    /// The buffer allocated to a half of a fused pair is leaked.
    Lost,
    /// One byte of data restarts the time limit for all data that a host owes.
    Renewed,
}

impl InjectedBug {
    pub(super) const ALL: [Self; 4] =
        [Self::Overwrite, Self::Misdirected, Self::Lost, Self::Renewed];
}

thread_local! {
    static PLANTED: Cell<Option<InjectedBug>> = const { Cell::new(None) };
}

/// Whether this bug is active.
pub(super) fn is_injected(injected_bug: InjectedBug) -> bool {
    PLANTED.get() == Some(injected_bug)
}

/// Runs `work` with a bug active.
pub(super) fn planted(injected_bug: InjectedBug, work: impl FnOnce()) {
    struct Removed;
    impl Drop for Removed {
        fn drop(&mut self) {
            PLANTED.set(None);
        }
    }
    PLANTED.set(Some(injected_bug));
    let _removed = Removed;
    work();
}
