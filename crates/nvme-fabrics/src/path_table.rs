//! Table of the paths to remote devices, and their states.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Table of the paths to remote devices. Clones share the table.
#[derive(Clone, Debug, Default)]
pub struct PathTable(Arc<Mutex<PathTableState>>);

/// Paths of one device, updated by its driver. They leave the table on drop.
#[derive(Debug)]
pub struct DevicePaths {
    table: PathTable,
    number: u64,
}

/// Change of a path's state. Paths are numbered from 0 in the order of the device's URI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathChange<'a> {
    /// The path is usable, with this ANA state.
    Up(usize, &'static str),
    /// The path was lost, with the reason.
    Lost(usize, &'a str),
    /// The ANA state of the path has changed.
    Changed(usize, &'static str),
    /// The path leads to a different device, which the text names.
    Mismatch(usize, &'a str),
    /// The path is now the preferred one.
    Selected(usize),
    /// No path is usable.
    AllPathsDown,
}

/// A path, as the table has it.
#[derive(Clone, Debug)]
pub struct PathRow {
    /// Device that the path leads to.
    pub device: String,
    /// Number of the path in the URI of the device, from 0.
    pub number: usize,
    /// Address of the remote end.
    pub address: String,
    /// `trying`, `up`, `lost`, or `unfit` if the path leads to a different device.
    pub state: &'static str,
    /// ANA state, while the path is up.
    pub access: Option<&'static str>,
    /// Whether it is the preferred path.
    pub is_preferred: bool,
    /// Why the path is not up.
    pub reason: Option<String>,
    /// Number of times the path came up.
    pub ups: u64,
    /// Number of times the path was lost.
    pub losses: u64,
    /// Number of attempts to connect that failed.
    pub failed_connects: u64,
    /// Number of times it replaced another path as the preferred one.
    pub failovers: u64,
    /// Number of commands that missed their deadline.
    pub timeouts: u64,
    /// Number of requests that the path has not completed, and that were sent again, on it or another path.
    pub retries: u64,
    /// Number of requests of the device that failed because no path was usable: the same for all its paths.
    pub unserved: u64,
    /// Security of its connections; the last one's while the path is not up.
    pub security: PathSecurity,
}

/// Counters of a device: of its requests, which its queues increment when a path fails, and of connects.
#[derive(Debug)]
pub struct PathCounters {
    /// By path.
    retries: Box<[AtomicU64]>,
    failed_connects: Box<[AtomicU64]>,
    unserved: AtomicU64,
}

/// Security of the connections of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathSecurity {
    /// IANA name of the cipher suite of TLS; `None` in plaintext.
    pub cipher_suite: Option<&'static str>,
    /// Whether the host was authenticated with DH-HMAC-CHAP.
    pub is_authenticated: bool,
}

/// Called with each change: the device, the address of the path if the change is of one, and the change.
pub type PathObserver = Box<dyn Fn(&str, Option<&str>, PathChange<'_>) + Send>;

#[derive(Default)]
struct PathTableState {
    rows: BTreeMap<u64, Vec<PathRow>>,
    names: BTreeMap<u64, String>,
    counters: BTreeMap<u64, Arc<PathCounters>>,
    /// Number of the next device.
    next: u64,
    observer: Option<PathObserver>,
}

impl PathTable {
    /// Sets the function that is called with each change.
    pub fn set_observer(&self, observer: PathObserver) {
        self.lock().observer = Some(observer);
    }

    /// Adds a device with its paths.
    #[must_use]
    pub fn add(&self, device: String, addresses: impl Iterator<Item = String>) -> DevicePaths {
        let row = |(number, address)| PathRow {
            device: device.clone(),
            number,
            address,
            state: "trying",
            access: None,
            is_preferred: false,
            reason: None,
            ups: 0,
            losses: 0,
            failed_connects: 0,
            failovers: 0,
            timeouts: 0,
            retries: 0,
            unserved: 0,
            security: PathSecurity::default(),
        };
        let mut devices = self.lock();
        let number = devices.next;
        devices.next += 1;
        devices.rows.insert(number, addresses.enumerate().map(row).collect());
        devices.names.insert(number, device);
        DevicePaths { table: self.clone(), number }
    }

    /// The paths of all devices, in the order in which the devices were added.
    pub fn rows(&self) -> Vec<PathRow> {
        let state = self.lock();
        let devices = state.rows.iter().map(|(number, rows)| (rows, state.counters.get(number)));
        let rows = devices.flat_map(|(rows, counters)| rows.iter().map(move |row| (row, counters)));
        let with_counts = rows.map(|(row, counters)| match counters {
            Some(counters) => PathRow {
                failed_connects: counters.failed_connects(row.number),
                retries: counters.retries(row.number),
                unserved: counters.unserved(),
                ..row.clone()
            },
            None => row.clone(),
        });
        with_counts.collect()
    }

    fn lock(&self) -> MutexGuard<'_, PathTableState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DevicePaths {
    /// Records a change, and passes it to the observer.
    pub fn record_change(&self, change: PathChange<'_>) {
        let mut devices = self.table.lock();
        let PathTableState { rows, names, observer, .. } = &mut *devices;
        let Some(rows) = rows.get_mut(&self.number) else { return };
        change.apply(rows);
        if let Some(observer) = observer {
            let address = change.path_index().and_then(|path| rows.get(path));
            let device = names.get(&self.number).map_or("", String::as_str);
            observer(device, address.map(|row| row.address.as_str()), change);
        }
    }

    /// Sets the counters of the device.
    pub fn set_counters(&self, counters: Arc<PathCounters>) {
        self.table.lock().counters.insert(self.number, counters);
    }

    /// Counts a command that missed its deadline.
    pub fn record_timeout(&self, path: usize) {
        let mut devices = self.table.lock();
        if let Some(row) = devices.rows.get_mut(&self.number).and_then(|rows| rows.get_mut(path)) {
            row.timeouts += 1;
        }
    }

    /// Records the security of a path that is about to be reported as up.
    pub fn record_security(&self, path: usize, security: PathSecurity) {
        let mut devices = self.table.lock();
        let row = devices.rows.get_mut(&self.number).and_then(|rows| rows.get_mut(path));
        if let Some(row) = row {
            row.security = security;
        }
    }
}

impl Drop for DevicePaths {
    fn drop(&mut self) {
        let mut devices = self.table.lock();
        devices.rows.remove(&self.number);
        devices.names.remove(&self.number);
        devices.counters.remove(&self.number);
    }
}

impl PathCounters {
    /// Counters of a device with `count` paths.
    pub(crate) fn new(count: usize) -> Self {
        let zeros = || (0..count).map(|_| AtomicU64::new(0)).collect();
        Self { retries: zeros(), failed_connects: zeros(), unserved: AtomicU64::new(0) }
    }

    // Relaxed: the counters publish nothing else.

    /// Counts requests that `path` has not completed, and that are sent again.
    pub(crate) fn count_retries(&self, path: usize, count: u64) {
        self.retries[path].fetch_add(count, Ordering::Relaxed);
    }

    /// Counts requests that failed because no path was usable.
    pub(crate) fn count_unserved(&self, count: usize) {
        self.unserved.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// Sets the number of attempts to connect `path` that failed.
    pub(crate) fn set_failed_connects(&self, path: usize, count: u64) {
        self.failed_connects[path].store(count, Ordering::Relaxed);
    }

    /// Number of attempts to connect `path` that failed.
    #[must_use]
    pub fn failed_connects(&self, path: usize) -> u64 {
        self.failed_connects.get(path).map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Number of requests that `path` has not completed, and that were sent again.
    #[must_use]
    pub fn retries(&self, path: usize) -> u64 {
        self.retries.get(path).map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Number of requests that failed because no path was usable.
    #[must_use]
    pub fn unserved(&self) -> u64 {
        self.unserved.load(Ordering::Relaxed)
    }
}

impl PathChange<'_> {
    /// The number of the path that has changed.
    pub const fn path_index(&self) -> Option<usize> {
        match *self {
            Self::Up(path, _)
            | Self::Lost(path, _)
            | Self::Changed(path, _)
            | Self::Mismatch(path, _)
            | Self::Selected(path) => Some(path),
            Self::AllPathsDown => None,
        }
    }

    fn apply(self, rows: &mut [PathRow]) {
        if let Self::Selected(_) | Self::AllPathsDown = self {
            rows.iter_mut().for_each(|row| row.is_preferred = false);
        }
        let has_preferred = rows.iter().any(|row| row.is_preferred);
        let Some(row) = self.path_index().and_then(|path| rows.get_mut(path)) else { return };
        match self {
            Self::Up(_, access) => {
                (row.state, row.access, row.reason) = ("up", Some(access), None);
                row.ups += 1;
                row.is_preferred |= !has_preferred;
            }
            Self::Lost(_, why) => {
                row.losses += u64::from(row.state == "up");
                (row.state, row.access, row.reason) = ("lost", None, Some(why.to_owned()));
                row.is_preferred = false;
            }
            Self::Mismatch(_, why) => {
                (row.state, row.access, row.reason) = ("unfit", None, Some(why.to_owned()));
            }
            Self::Changed(_, access) => row.access = Some(access),
            Self::Selected(_) => {
                row.is_preferred = true;
                row.failovers += 1;
            }
            Self::AllPathsDown => {}
        }
    }
}

impl fmt::Debug for PathTableState {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Devices").field("devices", &self.names.len()).finish_non_exhaustive()
    }
}
