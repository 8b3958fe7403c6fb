//! Storage server in memory. It is stricter than the real one: nothing is created twice.

use std::collections::BTreeMap;

use crate::status::{CallResult, Code, Status};
use crate::storage_api::{Host, NewVolume, Pool, PoolVolume, StorageApi, Subsystem};

pub(super) const POOL: &str = "0123456789abcdef0123456789abcdef";

/// Server, and the request at which the driver is killed.
#[derive(Clone, Debug)]
pub(super) struct SimulatedServer {
    pub(super) state: ServerState,
    /// Number of the request from now on; `None` when it was cut.
    pub(super) cut: Option<(u32, Cut)>,
}

/// Moment at which the driver is killed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cut {
    /// The request does not reach the server.
    Before,
    /// The response does not reach the driver.
    After,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServerState {
    pub(super) volumes: BTreeMap<String, PoolVolume>,
    pub(super) subsystems: BTreeMap<String, SubsystemState>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SubsystemState {
    volume: Option<String>,
    /// Whether each host may only read.
    pub(super) hosts: BTreeMap<String, bool>,
    limits: BTreeMap<&'static str, u64>,
}

impl SimulatedServer {
    pub(super) fn new() -> Self {
        let state = ServerState { volumes: BTreeMap::new(), subsystems: BTreeMap::new() };
        Self { state, cut: None }
    }

    fn request<T>(&mut self, run: impl FnOnce(&mut ServerState) -> CallResult<T>) -> CallResult<T> {
        let killed = || Err(Status::new(Code::Unavailable, "killed"));
        match &mut self.cut {
            Some((1, cut)) => {
                let cut = *cut;
                self.cut = None;
                if matches!(cut, Cut::After) {
                    run(&mut self.state)?;
                }
                killed()
            }
            Some((rest, _)) => {
                *rest -= 1;
                run(&mut self.state)
            }
            None => run(&mut self.state),
        }
    }
}

impl ServerState {
    fn subsystem(&mut self, nqn: &str) -> CallResult<&mut SubsystemState> {
        self.subsystems.get_mut(nqn).ok_or_else(|| Status::not_found(nqn))
    }

    fn add_volume(&mut self, volume: PoolVolume) -> CallResult<()> {
        let name = volume.name.clone();
        match self.volumes.insert(name.clone(), volume) {
            None => Ok(()),
            Some(_) => Err(Status::internal(format!("{name} exists"))),
        }
    }

    /// A volume or snapshot with the contents of another.
    fn derive(&mut self, from: &str, name: &str, is_snapshot: bool) -> CallResult<()> {
        let source = self.volumes.get(from).ok_or_else(|| Status::not_found(from))?;
        let (name, origin) = (name.to_owned(), Some(from.to_owned()));
        let new = PoolVolume { name, origin, is_snapshot, ..source.clone() };
        self.add_volume(new)
    }
}

impl StorageApi for SimulatedServer {
    fn pools(&mut self) -> CallResult<Vec<Pool>> {
        self.request(|_| {
            Ok(vec![Pool {
                uuid: POOL.to_owned(),
                name: "pool".to_owned(),
                uri: "file:/srv/pool".to_owned(),
                free_bytes: 512 << 20,
                stopped_because: None,
            }])
        })
    }

    fn volumes(&mut self, _: &str) -> CallResult<Vec<PoolVolume>> {
        self.request(|state| Ok(state.volumes.values().cloned().collect()))
    }

    fn create_volume(&mut self, _: &str, new: &NewVolume) -> CallResult<()> {
        let NewVolume { name, size_bytes, .. } = new.clone();
        self.request(|state| {
            state.add_volume(PoolVolume {
                name,
                origin: None,
                is_snapshot: false,
                size_bytes,
                used_bytes: 0,
            })
        })
    }

    fn clone_volume(&mut self, _: &str, from: &str, name: &str) -> CallResult<()> {
        self.request(|state| state.derive(from, name, false))
    }

    fn resize_volume(&mut self, _: &str, name: &str, size_bytes: u64) -> CallResult<()> {
        self.request(|state| {
            let volume = state.volumes.get_mut(name).ok_or_else(|| Status::not_found(name))?;
            if volume.size_bytes >= size_bytes {
                return Err(Status::internal(format!("{name} does not grow")));
            }
            volume.size_bytes = size_bytes;
            Ok(())
        })
    }

    fn delete_volume(&mut self, _: &str, name: &str) -> CallResult<()> {
        self.request(|state| {
            let is_it = |one: &SubsystemState| one.volume.as_deref() == Some(name);
            if state.subsystems.values().any(is_it) {
                return Err(Status::failed_precondition(format!("{name} is exported")));
            }
            state.volumes.remove(name);
            for other in state.volumes.values_mut() {
                other.origin.take_if(|origin| origin == name);
            }
            Ok(())
        })
    }

    fn snapshot_volumes(&mut self, _: &str, pairs: &[(String, String)]) -> CallResult<()> {
        self.request(|state| {
            let mut new = state.clone();
            for (volume, name) in pairs {
                new.derive(volume, name, true)?;
            }
            *state = new;
            Ok(())
        })
    }

    fn subsystems(&mut self) -> CallResult<Vec<Subsystem>> {
        self.request(|state| {
            let row = |(nqn, one): (&String, &SubsystemState)| Subsystem {
                nqn: nqn.clone(),
                namespaces: u64::from(one.volume.is_some()),
                addresses: vec!["192.0.2.1:4420".to_owned()],
            };
            Ok(state.subsystems.iter().map(row).collect())
        })
    }

    fn create_subsystem(&mut self, nqn: &str) -> CallResult<()> {
        self.request(|state| match state.subsystems.insert(nqn.to_owned(), Default::default()) {
            None => Ok(()),
            Some(_) => Err(Status::internal(format!("{nqn} exists"))),
        })
    }

    fn delete_subsystem(&mut self, nqn: &str) -> CallResult<()> {
        self.request(|state| {
            state.subsystems.remove(nqn).map(drop).ok_or_else(|| Status::not_found(nqn))
        })
    }

    fn create_namespace(&mut self, nqn: &str, _: &Pool, volume: &str) -> CallResult<()> {
        self.request(|state| {
            if !state.volumes.contains_key(volume) {
                return Err(Status::not_found(volume));
            }
            match state.subsystem(nqn)?.volume.replace(volume.to_owned()) {
                None => Ok(()),
                Some(other) => Err(Status::internal(format!("{other} is exported"))),
            }
        })
    }

    fn hosts(&mut self) -> CallResult<Vec<Host>> {
        self.request(|state| {
            let mut rows = Vec::new();
            for (nqn, one) in &state.subsystems {
                let row = |(host, is_read_only): (&String, &bool)| Host {
                    subsystem: nqn.clone(),
                    host: host.clone(),
                    is_read_only: *is_read_only,
                };
                rows.extend(one.hosts.iter().map(row));
            }
            Ok(rows)
        })
    }

    fn create_host(&mut self, nqn: &str, host: &str, is_read_only: bool) -> CallResult<()> {
        self.request(|state| {
            match state.subsystem(nqn)?.hosts.insert(host.to_owned(), is_read_only) {
                None => Ok(()),
                Some(_) => Err(Status::internal(format!("{host} exists"))),
            }
        })
    }

    fn delete_host(&mut self, nqn: &str, host: &str) -> CallResult<()> {
        self.request(|state| {
            let removed = state.subsystem(nqn)?.hosts.remove(host);
            removed.map(drop).ok_or_else(|| Status::not_found(host))
        })
    }

    fn set_limits(&mut self, nqn: &str, limits: &BTreeMap<&'static str, u64>) -> CallResult<()> {
        self.request(|state| {
            state.subsystem(nqn)?.limits.extend(limits);
            Ok(())
        })
    }
}
