//! Ownership of pools and mirrors open for writing: the owner record of this process, and whether the
//! process of another record has exited.

use std::sync::{Mutex, PoisonError};

use tenmil_linux::clock::utc_now;
use tenmil_linux::process_stats::ProcessIdentity;
use tenmil_volume::PoolOwner;
use tenmil_volume::format::{OwnerRecord, decode_name};

/// Ids of owners in this process. A record of this process with an id that is not here was abandoned.
static OPEN_HERE: Mutex<Vec<u128>> = Mutex::new(Vec::new());

/// Owner id of this process, for as long as a pool or a mirror is open.
#[derive(Debug)]
pub(super) struct RegisteredOwner(PoolOwner);

impl RegisteredOwner {
    /// Draws a new id and fills in the record of this process.
    pub(super) fn for_this_process() -> Self {
        let id =
            u128::from(tenmil_linux::random_seed()) << 64 | u128::from(tenmil_linux::random_seed());
        let ProcessIdentity { boot, machine, pid_namespace: pid_space, pid, started, host } =
            ProcessIdentity::of_this_process();
        let mut name = [0; 64];
        let end = (0..=host.len().min(name.len())).rev().find(|end| host.is_char_boundary(*end));
        let shown = host.as_bytes().get(..end.unwrap_or(0)).unwrap_or_default();
        name[..shown.len()].copy_from_slice(shown);
        let since = utc_now().unix_us / 1_000_000;
        let record =
            OwnerRecord { boot, machine, pid_space, started, since, pid, gap: 0, host: name };
        // Zero means no owner.
        Self::from_record(PoolOwner { id: id.max(1), record })
    }

    /// Registers a given owner as one of this process, whatever its record contains.
    pub(super) fn from_record(owner: PoolOwner) -> Self {
        with_open_owners(|open| open.push(owner.id));
        Self(owner)
    }

    pub(super) const fn owner_record(&self) -> PoolOwner {
        self.0
    }
}

impl Drop for RegisteredOwner {
    fn drop(&mut self) {
        with_open_owners(|open| open.retain(|id| *id != self.0.id));
    }
}

fn with_open_owners<T>(look: impl FnOnce(&mut Vec<u128>) -> T) -> T {
    look(&mut OPEN_HERE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The process in an owner record.
pub(super) fn process_of_owner(owner: &PoolOwner) -> ProcessIdentity {
    let OwnerRecord { boot, machine, pid_space, started, pid, host, .. } = owner.record;
    ProcessIdentity {
        boot,
        machine,
        pid_namespace: pid_space,
        pid,
        started,
        host: decode_name(&host),
    }
}

/// Whether an owner is known to have ended. Another process of this machine is checked by pid and start
/// time; on other machines nothing is known.
pub(super) fn has_owner_ended(owner: &PoolOwner) -> bool {
    let (process, this) = (process_of_owner(owner), ProcessIdentity::of_this_process());
    let is_here =
        process.is_same_boot(&this) && (process.pid, process.started) == (this.pid, this.started);
    match is_here {
        true => !with_open_owners(|open| open.contains(&owner.id)),
        false => process.is_gone() || process.is_of_earlier_boot(owner.record.since),
    }
}

#[cfg(test)]
mod tests {
    use super::{RegisteredOwner, has_owner_ended};

    #[test]
    fn owner_of_this_process_counts_as_ended_after_close() {
        let opener = RegisteredOwner::for_this_process();
        let owner = opener.owner_record();
        assert!(!has_owner_ended(&owner));
        drop(opener);
        assert!(has_owner_ended(&owner));
        let mut elsewhere = owner;
        elsewhere.record.boot += 1;
        assert!(!has_owner_ended(&elsewhere), "on another machine nothing is known");
    }
}
