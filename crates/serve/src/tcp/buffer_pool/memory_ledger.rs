//! Memory accounting by host NQN and by address.
//!
//! A connection is charged to its address until Connect names its host. An NQN alone proves nothing: one
//! client may use many, so the memory of an address is limited as well.

/// Ledger of hosts and addresses. An entry keeps its index while any connection refers to it.
#[derive(Debug, Default)]
pub(super) struct MemoryLedger {
    entries: Vec<LedgerEntry>,
    /// Number of the current pass over the wait queue.
    pass: u64,
}

#[derive(Debug, Default)]
struct LedgerEntry {
    /// Host or address; empty while the entry is unused.
    name: String,
    connections: u32,
    bytes: u64,
    /// Bytes that the entry may be charged; zero means unlimited.
    bytes_max: u64,
    /// Last pass in which a connection of this entry was met.
    last_pass: u64,
}

/// Entries to which a connection is charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChargedEntries {
    /// Entry of its host, or of its address while the host is unknown.
    pub(super) host: u32,
    /// Entry of its address, or an entry of its host alone if a subsystem lists the host.
    pub(super) address: u32,
    /// Whether the memory reserved for listed hosts is not available to this connection.
    pub(super) excluded_from_reserve: bool,
}

/// Host to which the memory of a connection is charged.
#[derive(Clone, Copy, Debug)]
pub(in crate::tcp) struct HostMemory<'a> {
    /// Name of its entry.
    pub(in crate::tcp) name: &'a str,
    pub(in crate::tcp) class: HostClass,
    /// Limit of its memory over all connections.
    pub(in crate::tcp) bytes_max: Option<u64>,
}

/// Memory class of a host, which determines its share of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tcp) enum HostClass {
    /// A subsystem lists the host: it has a share of its own, independent of its address.
    Named,
    /// No subsystem lists the host: it shares the limit of its address with other such hosts.
    Unnamed {
        /// Whether some subsystem lists hosts, for which memory is reserved.
        excluded_from_reserve: bool,
    },
}

impl HostClass {
    /// Class of a host: whether its subsystem lists its hosts, and whether any subsystem does.
    pub(in crate::tcp) const fn new(is_listed: bool, lists_hosts: bool) -> Self {
        match is_listed {
            true => Self::Named,
            false => Self::Unnamed { excluded_from_reserve: lists_hosts },
        }
    }
}

impl MemoryLedger {
    /// Adds a connection to an entry. Returns the index.
    pub(super) fn add_connection(&mut self, name: &str) -> u32 {
        let found = self.entries.iter().position(|entry| entry.name == name);
        let free = || self.entries.iter().position(|entry| entry.name.is_empty());
        let at = found.or_else(free).unwrap_or_else(|| {
            self.entries.push(LedgerEntry::default());
            self.entries.len() - 1
        });
        let entry = &mut self.entries[at];
        if entry.name.is_empty() {
            *entry = LedgerEntry { name: name.to_owned(), ..LedgerEntry::default() };
        }
        entry.connections += 1;
        u32::try_from(at).unwrap_or(u32::MAX)
    }

    /// Removes a connection from an entry.
    pub(super) fn remove_connection(&mut self, at: u32) {
        if let Some(entry) = self.entries.get_mut(at as usize) {
            entry.connections = entry.connections.saturating_sub(1);
            if entry.connections == 0 {
                *entry = LedgerEntry::default();
            }
        }
    }

    /// Bytes charged to an entry.
    pub(super) fn charged_bytes(&self, at: u32) -> u64 {
        self.entries.get(at as usize).map_or(0, |entry| entry.bytes)
    }

    /// Limits the bytes that an entry may be charged. The limit ends with its last connection.
    pub(super) fn set_limit(&mut self, at: u32, bytes_max: Option<u64>) {
        if let Some(entry) = self.entries.get_mut(at as usize) {
            entry.bytes_max = bytes_max.unwrap_or(0);
        }
    }

    /// Whether an entry may be charged as many more bytes.
    pub(super) fn is_within_limit(&self, at: u32, bytes: u64) -> bool {
        self.entries
            .get(at as usize)
            .is_none_or(|entry| entry.bytes_max == 0 || entry.bytes + bytes <= entry.bytes_max)
    }

    pub(super) fn charge(&mut self, at: u32, bytes: u64) {
        if let Some(entry) = self.entries.get_mut(at as usize) {
            entry.bytes += bytes;
        }
    }

    pub(super) fn uncharge(&mut self, at: u32, bytes: u64) {
        if let Some(entry) = self.entries.get_mut(at as usize) {
            entry.bytes = entry.bytes.saturating_sub(bytes);
        }
    }

    /// Starts another pass over the wait queue.
    pub(super) fn begin_wait_queue_pass(&mut self) {
        self.pass += 1;
    }

    /// Whether no connection of the entry was met in this pass. Marks it as met.
    pub(super) fn mark_first_in_pass(&mut self, at: u32) -> bool {
        let pass = self.pass;
        let entry = self.entries.get_mut(at as usize);
        entry.is_some_and(|entry| core::mem::replace(&mut entry.last_pass, pass) != pass)
    }

    /// Number of entries in use.
    #[cfg(test)]
    pub(super) fn entries_in_use(&self) -> usize {
        self.entries.iter().filter(|entry| entry.connections > 0).count()
    }
}
