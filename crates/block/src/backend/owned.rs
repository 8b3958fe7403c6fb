//! Who has a pool or a mirror open for writing: what this process writes down about itself, and whether
//! another one that is written down is known to be gone.

use std::sync::{Mutex, PoisonError};

use host::process::{ProcessIdentity, wall_clock_seconds};
use volume::Owner;
use volume::format::{OwnerRecord, unpadded};

/// Those that are open in this process: one that the medium names and that is not here was abandoned.
static OPEN_HERE: Mutex<Vec<u128>> = Mutex::new(Vec::new());

/// An owner, for as long as a pool or a mirror is open here.
#[derive(Debug)]
pub(super) struct Opener(Owner);

impl Opener {
    /// A new one.
    pub(super) fn draw() -> Self {
        let id = u128::from(host::random_seed()) << 64 | u128::from(host::random_seed());
        let ProcessIdentity { boot, machine, pid_space, pid, started, host } =
            ProcessIdentity::this();
        let mut name = [0; 64];
        let end = (0..=host.len().min(name.len())).rev().find(|end| host.is_char_boundary(*end));
        let shown = host.as_bytes().get(..end.unwrap_or(0)).unwrap_or_default();
        name[..shown.len()].copy_from_slice(shown);
        let since = wall_clock_seconds();
        let record =
            OwnerRecord { boot, machine, pid_space, started, since, pid, gap: 0, host: name };
        // Zero is nobody.
        Self::of(Owner { id: id.max(1), record })
    }

    /// This one, which is in this process whatever it says.
    pub(super) fn of(owner: Owner) -> Self {
        open_here(|open| open.push(owner.id));
        Self(owner)
    }

    pub(super) const fn owner(&self) -> Owner {
        self.0
    }
}

impl Drop for Opener {
    fn drop(&mut self) {
        open_here(|open| open.retain(|id| *id != self.0.id));
    }
}

fn open_here<T>(look: impl FnOnce(&mut Vec<u128>) -> T) -> T {
    look(&mut OPEN_HERE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The process that an owner is.
pub(super) fn process_of(owner: &Owner) -> ProcessIdentity {
    let OwnerRecord { boot, machine, pid_space, started, pid, host, .. } = owner.record;
    ProcessIdentity { boot, machine, pid_space, pid, started, host: unpadded(&host) }
}

/// Whether an owner is known to be gone.
pub(super) fn is_gone(owner: &Owner) -> bool {
    let (process, this) = (process_of(owner), ProcessIdentity::this());
    let is_here =
        process.is_neighbor(&this) && (process.pid, process.started) == (this.pid, this.started);
    match is_here {
        true => !open_here(|open| open.contains(&owner.id)),
        false => process.is_gone() || process.is_of_former_boot(owner.record.since),
    }
}

#[cfg(test)]
mod tests {
    use super::{Opener, is_gone};

    #[test]
    fn an_owner_in_this_process_is_there_for_as_long_as_it_has_the_store_open() {
        let opener = Opener::draw();
        let owner = opener.owner();
        assert!(!is_gone(&owner));
        drop(opener);
        assert!(is_gone(&owner));
        let mut elsewhere = owner;
        elsewhere.record.boot += 1;
        assert!(!is_gone(&elsewhere), "on another machine nobody knows");
    }
}
