//! Controller service: volumes, snapshots and exports of a storage server.
//!
//! Every call finds what exists by its name, and continues from there: it may have been interrupted after any
//! request to the server, and nothing is kept between calls. The order of requests is this:
//!
//! ```text
//!   create:   volume ─▶ size of a clone ─▶ subsystem ─▶ namespace ─▶ rate limits
//!   delete:   subsystem ─▶ volume
//! ```
//!
//! A volume that is exported is complete; one that is not was left by a call that did not end.

mod publish;
mod snapshots;
#[cfg(test)]
mod tests;
mod volumes;

use std::collections::BTreeMap;

use crate::messages::{Topology, TopologyRequirement};
use crate::names::VolumeId;
use crate::status::{CallResult, Code, Status};
use crate::storage_api::{Pool, PoolVolume, StorageApi};

/// Controller service over the API of a storage server, for one call.
pub(crate) struct Controller<'a, A> {
    pub(crate) api: &'a mut A,
    pub(crate) options: &'a ControllerOptions,
    /// Time of the call in seconds since 1970.
    pub(crate) now_s: u64,
}

/// Options of the controller.
#[derive(Clone, Debug, Default)]
pub(crate) struct ControllerOptions {
    /// Addresses of the server that nodes connect to; by default those of its listeners.
    pub(crate) addresses: Vec<String>,
    /// Topology of the nodes that can reach the server; without any, all can.
    pub(crate) topology: BTreeMap<String, String>,
}

/// Page of a list.
struct ListPage<T> {
    entries: Vec<T>,
    /// Token of the next page; empty if there is none.
    next_token: String,
}

impl<A: StorageApi> Controller<'_, A> {
    /// The pool of this name or UUID, or the only one.
    fn find_pool(&mut self, wanted: Option<&str>) -> CallResult<Pool> {
        let pools = self.api.pools()?;
        let names: Vec<_> = pools.iter().map(|pool| pool.name.clone()).collect();
        let is_it = |pool: &Pool| wanted.is_none_or(|it| it == pool.name || it == pool.uuid);
        let mut found = pools.into_iter().filter(is_it);
        match (found.next(), found.next()) {
            (Some(pool), None) => Ok(pool),
            (None, _) if names.is_empty() => Err(Status::unavailable(
                "the storage server has no pool open, expected a namespace of the server on a volume of the pool",
            )),
            _ => {
                let found = wanted.unwrap_or("no name");
                let text = format!("parameter pool: {found}, expected one of {}", names.join(", "));
                Err(Status::invalid_argument(text))
            }
        }
    }

    /// The open pool with a UUID.
    fn open_pool(&mut self, uuid: &str) -> CallResult<Pool> {
        let pools = self.api.pools()?;
        pools.into_iter().find(|pool| pool.uuid == uuid).ok_or_else(|| {
            Status::unavailable(format!("pool {uuid}: the storage server has it not open"))
        })
    }

    /// A volume with its pool. `None` if it does not exist.
    fn find_volume(&mut self, id: &VolumeId) -> CallResult<Option<(Pool, PoolVolume)>> {
        // A pool that no volume of the driver can be in is not asked for.
        let Some(pool) = self.api.pools()?.into_iter().find(|pool| pool.uuid == id.pool) else {
            return Err(Status::unavailable(format!(
                "volume {id}: the storage server has its pool not open"
            )));
        };
        let name = id.pool_name();
        let found = self.api.volumes(&pool.uuid)?.into_iter().find(|one| one.name == name);
        Ok(found.filter(|one| !one.is_snapshot).map(|volume| (pool, volume)))
    }

    /// The volume that a request names, or an error.
    fn expect_volume(&mut self, text: &str) -> CallResult<(VolumeId, Pool, PoolVolume)> {
        let none = || Status::not_found(format!("volume `{text}`: does not exist"));
        let id = VolumeId::parse(text).ok_or_else(none)?;
        let (pool, volume) = self.find_volume(&id)?.ok_or_else(none)?;
        Ok((id, pool, volume))
    }

    /// Topology of volumes and snapshots.
    fn accessible_topology(&self) -> Vec<Topology> {
        let segments = self.options.topology.clone();
        if segments.is_empty() { Vec::new() } else { vec![Topology { segments }] }
    }

    /// Whether nodes of a topology can reach the server.
    fn is_reached_from(&self, topology: &Topology) -> bool {
        let is_equal = |(key, value)| topology.segments.get(key) == Some(value);
        self.options.topology.iter().all(is_equal)
    }

    /// Refuses a volume that would not be accessible where it has to be.
    fn check_topology(&self, wanted: Option<&TopologyRequirement>) -> CallResult<()> {
        let Some(wanted) = wanted.filter(|wanted| !wanted.requisite.is_empty()) else {
            return Ok(());
        };
        if wanted.requisite.iter().any(|topology| self.is_reached_from(topology)) {
            return Ok(());
        }
        let segment = |(key, value): (&String, &String)| format!("{key}={value}");
        let segments: Vec<_> = self.options.topology.iter().map(segment).collect();
        let text = format!(
            "accessibility_requirements: the storage server is reached from {} only",
            segments.join(",")
        );
        Err(Status::new(Code::ResourceExhausted, text))
    }
}

/// One page of a list that is sorted by its keys: a token is the last key of the page before, so that a list that
/// changes meanwhile has no entry twice.
fn page_of<T>(
    all: Vec<(String, T)>,
    (token, entries_max): (&str, i32),
    is_key: impl Fn(&str) -> bool,
) -> CallResult<ListPage<T>> {
    if !token.is_empty() && !is_key(token) {
        let text = format!("starting_token: `{token}` is none of this list");
        return Err(Status::new(Code::Aborted, text));
    }
    let Ok(entries_max) = usize::try_from(entries_max) else {
        return Err(Status::invalid_argument(format!("max_entries: {entries_max}, expected >= 0")));
    };
    let entries_max = if entries_max == 0 { usize::MAX } else { entries_max };
    let mut rest = all;
    rest.sort_by(|(key, _), (other, _)| key.cmp(other));
    rest.retain(|(key, _)| key.as_str() > token);
    let has_more = rest.len() > entries_max;
    rest.truncate(entries_max);
    let last = rest.last().map(|(key, _)| key.clone()).filter(|_| has_more);
    let entries = rest.into_iter().map(|(_, entry)| entry).collect();
    Ok(ListPage { entries, next_token: last.unwrap_or_default() })
}

/// Size in a message.
fn message_size(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
