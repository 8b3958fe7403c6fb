//! Exports: a subsystem for each volume, and the hosts that may connect to it.

use std::net::SocketAddr;

use super::Controller;
use crate::capabilities::Access;
use crate::connection::Connection;
use crate::messages::{
    ControllerPublishVolumeRequest, ControllerPublishVolumeResponse,
    ControllerUnpublishVolumeRequest,
};
use crate::names::{VolumeId, is_host_nqn};
use crate::status::{CallResult, Status, check_present};
use crate::storage_api::{Host, Pool, StorageApi};

impl<A: StorageApi> Controller<'_, A> {
    pub(crate) fn publish_volume(
        &mut self,
        request: &ControllerPublishVolumeRequest,
    ) -> CallResult<ControllerPublishVolumeResponse> {
        check_present("volume_id", &request.volume_id)?;
        check_present("node_id", &request.node_id)?;
        let access = Access::required(request.volume_capability.as_ref())?;
        let (id, pool, _) = self.expect_volume(&request.volume_id)?;
        let host = &request.node_id;
        if !is_host_nqn(host) {
            let text = format!("node `{host}`: does not exist, expected the NQN of a host");
            return Err(Status::not_found(text));
        }
        let (nqn, is_read_only) = (id.nqn(), request.readonly || access.is_read_only());
        let hosts = self.hosts_of(&nqn)?;
        let (same, others): (Vec<_>, Vec<_>) = hosts.into_iter().partition(|one| one.host == *host);
        if access.is_single_node() && !others.is_empty() {
            let others: Vec<_> = others.into_iter().map(|other| other.host).collect();
            let text =
                format!("volume {id}: published to {}, expected one node", others.join(", "));
            return Err(Status::failed_precondition(text));
        }
        self.export_volume(&id, &pool)?;
        match same.first() {
            Some(same) if same.is_read_only != is_read_only => {
                let mode = |is_read_only| if is_read_only { "read-only" } else { "writable" };
                let (found, asked) = (mode(same.is_read_only), mode(is_read_only));
                let text = format!("volume {id}: published to {host} {found}, requested {asked}");
                return Err(Status::already_exists(text));
            }
            Some(_) => {}
            None => self.api.create_host(&nqn, host, is_read_only)?,
        }
        let addresses = self.addresses_of(&nqn)?;
        let connection = Connection { nqn, addresses, host: host.clone() };
        Ok(ControllerPublishVolumeResponse { publish_context: connection.to_context() })
    }

    pub(crate) fn unpublish_volume(
        &mut self,
        request: &ControllerUnpublishVolumeRequest,
    ) -> CallResult<()> {
        check_present("volume_id", &request.volume_id)?;
        let Some(id) = VolumeId::parse(&request.volume_id) else { return Ok(()) };
        let nqn = id.nqn();
        let is_meant = |host: &Host| request.node_id.is_empty() || host.host == request.node_id;
        for host in self.hosts_of(&nqn)?.into_iter().filter(is_meant) {
            self.api.delete_host(&nqn, &host.host)?;
        }
        Ok(())
    }

    /// Makes sure that a volume is exported. No host may connect until it is published.
    pub(super) fn export_volume(&mut self, id: &VolumeId, pool: &Pool) -> CallResult<()> {
        let nqn = id.nqn();
        let subsystems = self.api.subsystems()?;
        let namespaces = match subsystems.into_iter().find(|one| one.nqn == nqn) {
            Some(subsystem) => subsystem.namespaces,
            None => {
                self.api.create_subsystem(&nqn)?;
                0
            }
        };
        match namespaces {
            0 => self.api.create_namespace(&nqn, pool, &id.pool_name()),
            _ => Ok(()),
        }
    }

    /// Whether a volume is exported.
    pub(super) fn is_exported(&mut self, id: &VolumeId) -> CallResult<bool> {
        let nqn = id.nqn();
        let is_it = |namespaces: u64, found: &str| found == nqn && namespaces > 0;
        Ok(self.api.subsystems()?.iter().any(|one| is_it(one.namespaces, &one.nqn)))
    }

    /// The hosts that a volume is published to.
    pub(super) fn hosts_of(&mut self, nqn: &str) -> CallResult<Vec<Host>> {
        let mut hosts = self.api.hosts()?;
        hosts.retain(|host| host.subsystem == nqn);
        Ok(hosts)
    }

    /// Addresses that a node connects to.
    fn addresses_of(&mut self, nqn: &str) -> CallResult<Vec<String>> {
        if !self.options.addresses.is_empty() {
            return Ok(self.options.addresses.clone());
        }
        let subsystems = self.api.subsystems()?;
        let shown = subsystems.into_iter().find(|one| one.nqn == nqn);
        let addresses = shown.map(|one| one.addresses).unwrap_or_default();
        let is_any = |address: &&String| {
            address.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_unspecified())
        };
        if let Some(any) = addresses.iter().find(is_any) {
            let text = format!(
                "listener {any}: listens at every address, expected the addresses that nodes connect to: \
                 --address ADDRESS:PORT"
            );
            return Err(Status::failed_precondition(text));
        }
        if addresses.is_empty() {
            let text = format!("subsystem {nqn}: no listener of the storage server shows it");
            return Err(Status::failed_precondition(text));
        }
        Ok(addresses)
    }
}
