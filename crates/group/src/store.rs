//! Store of a group: a map of keys with revisions, transactions that compare them, and leases.

use std::collections::BTreeMap;

use tenmil_base::Span;

/// Number of a lease in a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub u64);

/// Store that the members of a group share. A store is linearizable: a read has every transaction that was
/// answered before the read was sent.
pub trait Store {
    /// Executes an operation, and waits for its reply. An operation that was not answered in time, and may have
    /// been executed, is [`StoreReply::Unknown`].
    fn execute(&mut self, operation: &StoreOperation) -> StoreReply;
}

/// Operation of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreOperation {
    /// Creates a lease.
    Grant {
        /// Time after which it ends unless it is renewed. A store may round it up.
        time_to_live: Span,
    },
    /// Renews a lease for its whole time.
    Renew(LeaseId),
    /// Ends a lease, and deletes the keys that it holds.
    Revoke(LeaseId),
    /// Reads all keys of the group.
    Read,
    /// Executes a transaction.
    Commit(Transaction),
}

/// Reply of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreReply {
    /// The lease that was created.
    Granted(LeaseId),
    /// The lease was renewed or revoked.
    Done,
    /// The lease has ended: its keys are deleted.
    LeaseEnded,
    /// The map at one revision.
    Snapshot(Snapshot),
    /// The transaction was executed.
    Committed,
    /// A condition did not hold: nothing was executed.
    Conflict,
    /// The operation may have been executed or not, or be executed later. The text is the cause.
    Unknown(String),
}

/// All keys of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Keys, without the prefix of the group.
    pub entries: BTreeMap<String, Entry>,
}

/// Value of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Value.
    pub value: String,
    /// Revision of the store at which the key was written last.
    pub revision: u64,
}

/// Transaction: all of it is executed if every condition holds, and nothing otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transaction {
    /// Conditions.
    pub conditions: Vec<Condition>,
    /// Keys to write.
    pub puts: Vec<Put>,
}

/// Condition on a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Key.
    pub key: String,
    /// Revision at which it was written last; 0: it does not exist.
    pub revision: u64,
}

/// Key to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Put {
    /// Key.
    pub key: String,
    /// Value.
    pub value: String,
    /// Lease with which the key ends.
    pub lease: Option<LeaseId>,
}

impl Snapshot {
    /// Revision of a key, as a [`Condition`] has it.
    #[must_use]
    pub fn revision_of(&self, key: &str) -> u64 {
        self.entries.get(key).map_or(0, |entry| entry.revision)
    }
}
