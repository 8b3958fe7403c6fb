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
    static ACTIVE: Cell<Option<InjectedBug>> = const { Cell::new(None) };
}

/// Whether this bug is active.
pub(super) fn is_injected(injected_bug: InjectedBug) -> bool {
    ACTIVE.get() == Some(injected_bug)
}

/// Runs `work` with a bug active.
pub(super) fn with_injected_bug(injected_bug: InjectedBug, work: impl FnOnce()) {
    struct ClearOnDrop;
    impl Drop for ClearOnDrop {
        fn drop(&mut self) {
            ACTIVE.set(None);
        }
    }
    ACTIVE.set(Some(injected_bug));
    let _removed = ClearOnDrop;
    work();
}
