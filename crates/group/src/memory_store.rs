//! Store in memory, for simulations and tests. Time is an argument.

use std::collections::BTreeMap;

use tenmil_base::{Instant, Span};

use super::store::{Entry, LeaseId, Snapshot, StoreOperation, StoreReply, Transaction};

/// Store in memory.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore {
    entries: BTreeMap<String, (Entry, Option<LeaseId>)>,
    leases: BTreeMap<LeaseId, Lease>,
    revision: u64,
    leases_granted: u64,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    time_to_live: Span,
    ends_at: Instant,
}

impl MemoryStore {
    /// Executes an operation at a time.
    pub fn execute_at(&mut self, now: Instant, operation: &StoreOperation) -> StoreReply {
        self.end_leases(now);
        match operation {
            StoreOperation::Grant { time_to_live } => {
                self.leases_granted += 1;
                let id = LeaseId(self.leases_granted);
                let ends_at = now.after(*time_to_live);
                self.leases.insert(id, Lease { time_to_live: *time_to_live, ends_at });
                StoreReply::Granted(id)
            }
            StoreOperation::Renew(id) => match self.leases.get_mut(id) {
                Some(lease) => {
                    lease.ends_at = now.after(lease.time_to_live);
                    StoreReply::Done
                }
                None => StoreReply::LeaseEnded,
            },
            StoreOperation::Revoke(id) => match self.leases.remove(id) {
                Some(_) => {
                    self.delete_keys_of(*id);
                    StoreReply::Done
                }
                None => StoreReply::LeaseEnded,
            },
            StoreOperation::Read => StoreReply::Snapshot(self.snapshot()),
            StoreOperation::Commit(transaction) => self.commit(transaction),
        }
    }

    /// Ends the leases whose time is over. Returns the current revision, which changes with every key.
    pub fn end_leases(&mut self, now: Instant) -> u64 {
        let ended: Vec<LeaseId> =
            self.leases.iter().filter(|(_, it)| it.ends_at <= now).map(|(id, _)| *id).collect();
        for id in ended {
            self.leases.remove(&id);
            self.delete_keys_of(id);
        }
        self.revision
    }

    fn commit(&mut self, transaction: &Transaction) -> StoreReply {
        let revision_of = |key: &str| self.entries.get(key).map_or(0, |(entry, _)| entry.revision);
        if transaction.conditions.iter().any(|it| revision_of(&it.key) != it.revision) {
            return StoreReply::Conflict;
        }
        // As etcd: a key cannot be held by a lease that does not exist.
        let mut leases = transaction.puts.iter().filter_map(|put| put.lease);
        if leases.any(|id| !self.leases.contains_key(&id)) {
            return StoreReply::LeaseEnded;
        }
        self.revision += 1;
        for put in &transaction.puts {
            let entry = Entry { value: put.value.clone(), revision: self.revision };
            self.entries.insert(put.key.clone(), (entry, put.lease));
        }
        StoreReply::Committed
    }

    fn snapshot(&self) -> Snapshot {
        let entries = self.entries.iter().map(|(key, (entry, _))| (key.clone(), entry.clone()));
        Snapshot { entries: entries.collect() }
    }

    fn delete_keys_of(&mut self, id: LeaseId) {
        self.entries.retain(|_, (_, lease)| *lease != Some(id));
        self.revision += 1;
    }
}
