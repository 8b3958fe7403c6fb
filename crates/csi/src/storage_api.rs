//! What the controller needs of a storage server. Each method is one request, and durable when it returns.

use std::collections::BTreeMap;

use crate::status::CallResult;

/// API of a storage server.
pub(crate) trait StorageApi {
    /// The pools that the server has open.
    fn pools(&mut self) -> CallResult<Vec<Pool>>;

    /// All volumes and snapshots of a pool.
    fn volumes(&mut self, pool: &str) -> CallResult<Vec<PoolVolume>>;

    /// Creates an empty volume.
    fn create_volume(&mut self, pool: &str, new: &NewVolume) -> CallResult<()>;

    /// Creates a volume with the contents of another volume or of a snapshot, of the same size.
    fn clone_volume(&mut self, pool: &str, from: &str, name: &str) -> CallResult<()>;

    fn resize_volume(&mut self, pool: &str, name: &str, size_bytes: u64) -> CallResult<()>;

    /// Deletes a volume that is not exported, or a snapshot; clones of it stay. One that does not exist is no
    /// error.
    fn delete_volume(&mut self, pool: &str, name: &str) -> CallResult<()>;

    /// Creates a snapshot of each volume, all at one point in time: pairs of volume and name of its snapshot.
    fn snapshot_volumes(&mut self, pool: &str, pairs: &[(String, String)]) -> CallResult<()>;

    /// The subsystems that the server exports.
    fn subsystems(&mut self) -> CallResult<Vec<Subsystem>>;

    /// Creates a subsystem that no host may connect to.
    fn create_subsystem(&mut self, nqn: &str) -> CallResult<()>;

    /// Deletes a subsystem with its namespaces, and closes their devices.
    fn delete_subsystem(&mut self, nqn: &str) -> CallResult<()>;

    /// Adds a volume to a subsystem, as namespace 1.
    fn create_namespace(&mut self, nqn: &str, pool: &Pool, volume: &str) -> CallResult<()>;

    /// The hosts that may connect to subsystems of a server.
    fn hosts(&mut self) -> CallResult<Vec<Host>>;

    fn create_host(&mut self, nqn: &str, host: &str, is_read_only: bool) -> CallResult<()>;

    /// Forbids a host to connect, and disconnects it.
    fn delete_host(&mut self, nqn: &str, host: &str) -> CallResult<()>;

    /// Changes the rate limits of a subsystem: parameters of the method `subsystem_limits`.
    fn set_limits(&mut self, nqn: &str, limits: &BTreeMap<&'static str, u64>) -> CallResult<()>;
}

/// Pool that a server has open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pool {
    pub(crate) uuid: String,
    pub(crate) name: String,
    /// URI of its device.
    pub(crate) uri: String,
    pub(crate) free_bytes: u64,
    /// Why it accepts no changes.
    pub(crate) stopped_because: Option<String>,
}

/// Volume or snapshot of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PoolVolume {
    pub(crate) name: String,
    /// Volume or snapshot that it was created from, if that exists.
    pub(crate) origin: Option<String>,
    pub(crate) is_snapshot: bool,
    pub(crate) size_bytes: u64,
    /// Space of what was written, also by the source of a clone.
    pub(crate) used_bytes: u64,
}

/// Volume to create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NewVolume {
    pub(crate) name: String,
    pub(crate) size_bytes: u64,
    pub(crate) is_thick: bool,
    pub(crate) has_checksums: bool,
}

/// Subsystem that a server exports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Subsystem {
    pub(crate) nqn: String,
    pub(crate) namespaces: u64,
    /// Addresses of the listeners that show it.
    pub(crate) addresses: Vec<String>,
}

/// Host that may connect to a subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    /// NQN of the subsystem.
    pub(crate) subsystem: String,
    /// NQN of the host.
    pub(crate) host: String,
    pub(crate) is_read_only: bool,
}
