//! Node service: a published volume becomes a block device, a file system, a mount.
//!
//! ```text
//!   stage:    attach ─▶ make or check the file system ─▶ mount at the staging path ─▶ grow the file system
//!   publish:  bind mount of the staging path, or of the device node, at the target path
//! ```
//!
//! Every call looks at what is attached and mounted, and continues from there. The one step that cannot be seen
//! afterwards, a file system that is being made, is recorded before it begins: such a device was empty.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;

use crate::capabilities::{Access, FsType, MountAccess};
use crate::connection::Connection;
use crate::messages::{
    HealthEntry, HealthError, Mode, NodeExpandVolumeRequest, NodeExpandVolumeResponse,
    NodeGetInfoResponse, NodeGetStorageHealthResponse, NodeGetVolumeRequest,
    NodeGetVolumeStatsResponse, NodePathRequest, NodePublishVolumeRequest, NodeStageVolumeRequest,
    Topology, UsageUnit, VolumeHealth, VolumeHealthResponse, VolumeUsage,
};
use crate::names::VolumeId;
use crate::node_system::{Device, FileSystemUsage, Mount, NodeSystem};
use crate::status::{CallResult, Code, Status, check_present};

/// Node service, for one call.
pub(crate) struct Node<'a, S> {
    pub(crate) system: &'a mut S,
    pub(crate) options: &'a NodeOptions,
}

/// Options of the node.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeOptions {
    /// NQN of the host, which is the identifier of the node.
    pub(crate) host: String,
    pub(crate) topology: BTreeMap<String, String>,
    /// Largest number of volumes; 0 for no limit.
    pub(crate) volumes_max: u32,
}

/// More mounts than this at one place are not made by the driver.
const MOUNTS_AT_PLACE_MAX: usize = 16;
/// Type of an error of storage: unreachable.
const STORAGE_UNREACHABLE: i32 = 2;

impl<S: NodeSystem> Node<'_, S> {
    pub(crate) fn stage_volume(&mut self, request: &NodeStageVolumeRequest) -> CallResult<()> {
        check_present("volume_id", &request.volume_id)?;
        check_present("staging_target_path", &request.staging_target_path)?;
        let access = Access::required(request.volume_capability.as_ref())?;
        let id = parse_volume_id(&request.volume_id)?;
        let connection = Connection::from_context(&id, &request.publish_context)?;
        if connection.host != self.options.host {
            let text = format!(
                "publish_context: host {}, expected {}, this node",
                connection.host, self.options.host
            );
            return Err(Status::invalid_argument(text));
        }
        if let Some(problem) = self.system.attachment_problem() {
            return Err(Status::failed_precondition(problem));
        }
        let device = self.system.attach(&connection)?;
        let Some(mount) = &access.mount else { return Ok(()) };
        let staging = self.system.resolve(Path::new(&request.staging_target_path));
        let is_read_only = access.is_read_only();
        match self.mount_at(&staging)? {
            Some(found) if found.device != device.number => {
                let text = format!(
                    "{}: device {} is mounted, expected {} or none",
                    staging.display(),
                    found.device,
                    device.number
                );
                return Err(Status::failed_precondition(text));
            }
            Some(_) => {}
            None => self.mount_volume(&connection.nqn, &device, mount, is_read_only, &staging)?,
        }
        match is_read_only {
            true => Ok(()),
            // A clone may be larger than its source, and a volume may have grown while it was not staged.
            false => self.system.grow_file_system(&device, mount.fs_type, &staging),
        }
    }

    /// Makes or checks the file system of a device, and mounts it.
    fn mount_volume(
        &mut self,
        nqn: &str,
        device: &Device,
        access: &MountAccess,
        is_read_only: bool,
        staging: &Path,
    ) -> CallResult<()> {
        let fs_type = access.fs_type;
        let mut flags = access.flags.clone();
        if is_read_only {
            flags.push("ro".to_owned());
        }
        self.system.create_directory(staging)?;
        let content = self.system.content(device)?;
        if self.system.is_formatting(nqn)? {
            // It was killed while the file system was made, or after that. One that can be mounted is whole.
            if content.as_deref() == Some(fs_type.name()) {
                match self.system.mount(device, staging, fs_type, &flags) {
                    Ok(()) => return self.system.set_formatting(nqn, false),
                    Err(refused) if refused.code == Code::Internal => {}
                    Err(late) => return Err(late),
                }
            }
            self.system.make_file_system(device, fs_type)?;
            self.system.set_formatting(nqn, false)?;
            return self.system.mount(device, staging, fs_type, &flags);
        }
        match content {
            Some(found) if found != fs_type.name() => {
                let text = format!(
                    "{}: has {found}, expected {} or nothing",
                    device.path.display(),
                    fs_type.name()
                );
                return Err(Status::failed_precondition(text));
            }
            Some(_) if is_read_only => {}
            Some(_) => self.system.check_file_system(device, fs_type)?,
            None if is_read_only => {
                let text =
                    format!("{}: has no file system, expected one to read", device.path.display());
                return Err(Status::failed_precondition(text));
            }
            None => {
                self.system.set_formatting(nqn, true)?;
                self.system.make_file_system(device, fs_type)?;
                self.system.set_formatting(nqn, false)?;
            }
        }
        self.system.mount(device, staging, fs_type, &flags)
    }

    pub(crate) fn unstage_volume(&mut self, request: &NodePathRequest) -> CallResult<()> {
        check_present("volume_id", &request.volume_id)?;
        check_present("staging_target_path", &request.path)?;
        let nqn = parse_volume_id(&request.volume_id)?.nqn();
        let staging = self.system.resolve(Path::new(&request.path));
        self.unmount_all(&staging)?;
        if let Some(device) = self.system.attached_device(&nqn)? {
            let is_used = |mount: &Mount| mount.device == device.number;
            if let Some(used) = self.system.mounts()?.into_iter().find(is_used) {
                let text = format!(
                    "{}: mounted at {}, expected nowhere",
                    device.path.display(),
                    used.target.display()
                );
                return Err(Status::failed_precondition(text));
            }
        }
        self.system.detach(&nqn)?;
        self.system.set_formatting(&nqn, false)
    }

    pub(crate) fn publish_volume(&mut self, request: &NodePublishVolumeRequest) -> CallResult<()> {
        check_present("volume_id", &request.volume_id)?;
        check_present("target_path", &request.target_path)?;
        let access = Access::required(request.volume_capability.as_ref())?;
        let id = parse_volume_id(&request.volume_id)?;
        if request.staging_target_path.is_empty() {
            return Err(Status::failed_precondition("staging_target_path: missing"));
        }
        let staging = self.system.resolve(Path::new(&request.staging_target_path));
        let target = self.system.resolve(Path::new(&request.target_path));
        let not_staged = || {
            let text = format!("volume {id}: not staged at {}", staging.display());
            Status::failed_precondition(text)
        };
        let device = self.system.attached_device(&id.nqn())?.ok_or_else(not_staged)?;
        let mounts = self.system.mounts()?;
        let is_elsewhere = |mount: &&Mount| {
            mount.device == device.number && mount.target != staging && mount.target != target
        };
        if access.mode == Mode::SingleNodeSingleWriter
            && let Some(other) = mounts.iter().find(is_elsewhere)
        {
            let text = format!(
                "volume {id}: published at {}, expected one target path",
                other.target.display()
            );
            return Err(Status::failed_precondition(text));
        }
        let is_read_only = request.readonly || access.is_read_only();
        let found = mounts.iter().rfind(|mount| mount.target == target);
        match found {
            Some(found) if found.device != device.number => {
                let (place, other) = (target.display(), &found.device);
                let text = format!("{place}: device {other} is mounted, expected none");
                return Err(Status::failed_precondition(text));
            }
            Some(found) if found.is_read_only && !is_read_only => {
                let text = format!("{}: mounted read-only, requested writable", target.display());
                return Err(Status::already_exists(text));
            }
            Some(_) => {}
            None if access.mount.is_some() => {
                let is_staged =
                    |mount: &Mount| mount.target == staging && mount.device == device.number;
                if !mounts.iter().any(is_staged) {
                    return Err(not_staged());
                }
                self.system.create_directory(&target)?;
                self.system.bind_mount(&staging, &target)?;
            }
            None => {
                self.system.create_file(&target)?;
                self.system.bind_mount(&device.path, &target)?;
            }
        }
        // A bind mount is writable at first.
        match is_read_only && !found.is_some_and(|found| found.is_read_only) {
            true => self.system.remount_read_only(&target),
            false => Ok(()),
        }
    }

    pub(crate) fn unpublish_volume(&mut self, request: &NodePathRequest) -> CallResult<()> {
        check_present("volume_id", &request.volume_id)?;
        check_present("target_path", &request.path)?;
        let target = self.system.resolve(Path::new(&request.path));
        self.unmount_all(&target)?;
        self.system.remove(&target)
    }

    pub(crate) fn volume_stats(
        &mut self,
        request: &NodeGetVolumeRequest,
    ) -> CallResult<NodeGetVolumeStatsResponse> {
        check_present("volume_id", &request.volume_id)?;
        check_present("volume_path", &request.volume_path)?;
        let (device, mount) = self.volume_at(&request.volume_id, &request.volume_path)?;
        let whole = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        if mount.fs_type.is_none() {
            let total = whole(self.system.wait_for_size(&device, 0)?);
            let unit = UsageUnit::Bytes as i32;
            let usage = vec![VolumeUsage { available: 0, total, used: 0, unit }];
            return Ok(NodeGetVolumeStatsResponse { usage });
        }
        let FileSystemUsage { size_bytes, free_bytes, available_bytes, inodes, free_inodes } =
            self.system.file_system_usage(&mount.target)?;
        let bytes = VolumeUsage {
            available: whole(available_bytes),
            total: whole(size_bytes),
            used: whole(size_bytes.saturating_sub(free_bytes)),
            unit: UsageUnit::Bytes as i32,
        };
        let inodes = VolumeUsage {
            available: whole(free_inodes),
            total: whole(inodes),
            used: whole(inodes.saturating_sub(free_inodes)),
            unit: UsageUnit::Inodes as i32,
        };
        Ok(NodeGetVolumeStatsResponse { usage: vec![bytes, inodes] })
    }

    pub(crate) fn expand_volume(
        &mut self,
        request: &NodeExpandVolumeRequest,
    ) -> CallResult<NodeExpandVolumeResponse> {
        check_present("volume_id", &request.volume_id)?;
        check_present("volume_path", &request.volume_path)?;
        let required = request.capacity_range.unwrap_or_default().required_bytes;
        let required = u64::try_from(required).map_err(|_| {
            Status::invalid_argument(format!("capacity_range: {required}, expected >= 0"))
        })?;
        let (device, mount) = self.volume_at(&request.volume_id, &request.volume_path)?;
        let size = self.system.wait_for_size(&device, required)?;
        if let Some(name) = mount.fs_type.as_deref() {
            let fs_type = FsType::from_name(name).ok_or_else(|| {
                let text =
                    format!("{}: file system {name}, expected ext4 or xfs", mount.target.display());
                Status::failed_precondition(text)
            })?;
            self.system.grow_file_system(&device, fs_type, &mount.target)?;
        }
        Ok(NodeExpandVolumeResponse { capacity_bytes: i64::try_from(size).unwrap_or(i64::MAX) })
    }

    pub(crate) fn volume_health(
        &mut self,
        request: &NodeGetVolumeRequest,
    ) -> CallResult<VolumeHealthResponse> {
        check_present("volume_id", &request.volume_id)?;
        let id = parse_volume_id(&request.volume_id)?;
        let is_attached = self.system.attached_device(&id.nqn())?.is_some();
        let lost = HealthEntry {
            status: HealthError::Inaccessible as i32,
            reason: "NotAttached".to_owned(),
            message: format!("subsystem {}: not connected", id.nqn()),
        };
        let health_statuses = if is_attached { Vec::new() } else { vec![lost] };
        let volume_id = request.volume_id.clone();
        Ok(VolumeHealthResponse {
            volume_health: Some(VolumeHealth { volume_id, health_statuses }),
        })
    }

    pub(crate) fn storage_health(&mut self) -> NodeGetStorageHealthResponse {
        let entry = |message| HealthEntry {
            status: STORAGE_UNREACHABLE,
            reason: "NoAttachment".to_owned(),
            message,
        };
        let backend_health = self.system.attachment_problem().map(entry).into_iter().collect();
        NodeGetStorageHealthResponse { backend_health }
    }

    pub(crate) fn info(&self) -> NodeGetInfoResponse {
        let NodeOptions { host, topology, volumes_max } = self.options.clone();
        let is_somewhere = !topology.is_empty();
        NodeGetInfoResponse {
            node_id: host,
            max_volumes_per_node: i64::from(volumes_max),
            accessible_topology: is_somewhere.then_some(Topology { segments: topology }),
        }
    }

    /// The device of a volume and its mount at a path, or an error.
    fn volume_at(&mut self, id: &str, path: &str) -> CallResult<(Device, Mount)> {
        let id = parse_volume_id(id)?;
        let none = || Status::not_found(format!("volume {id}: not at {path}"));
        let device = self.system.attached_device(&id.nqn())?.ok_or_else(none)?;
        let place = self.system.resolve(Path::new(path));
        let mount = self.mount_at(&place)?.filter(|mount| mount.device == device.number);
        Ok((device, mount.ok_or_else(none)?))
    }

    /// The last mount at a place.
    fn mount_at(&mut self, place: &Path) -> CallResult<Option<Mount>> {
        Ok(self.system.mounts()?.into_iter().rfind(|mount| mount.target == place))
    }

    fn unmount_all(&mut self, place: &Path) -> CallResult<()> {
        for _ in 0..MOUNTS_AT_PLACE_MAX {
            if self.mount_at(place)?.is_none() {
                return Ok(());
            }
            self.system.unmount(place)?;
        }
        Err(Status::internal(format!("{}: still mounted", place.display())))
    }
}

fn parse_volume_id(text: &str) -> CallResult<VolumeId> {
    VolumeId::parse(text)
        .ok_or_else(|| Status::not_found(format!("volume `{text}`: does not exist")))
}
