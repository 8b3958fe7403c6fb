//! `--self-test`: the life of some volumes, through a driver that is running on this node.
//!
//! It makes the calls of an orchestrator, writes files and blocks, and compares what snapshots, clones and expanded
//! volumes have. A call that finds no driver is repeated, as an orchestrator does, so the driver may be killed
//! meanwhile.

use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use prost::Message;
use tenmil_base::{Error, Random};

use crate::capabilities::FsType;
use crate::grpc_client::call;
use crate::messages::{
    AccessMode, CapacityRange, ControllerExpandVolumeRequest, ControllerExpandVolumeResponse,
    ControllerPublishVolumeRequest, ControllerPublishVolumeResponse,
    ControllerUnpublishVolumeRequest, CreateSnapshotRequest, CreateVolumeRequest,
    CreateVolumeResponse, Empty, Mode, MountVolume, NodeExpandVolumeRequest,
    NodeExpandVolumeResponse, NodeGetInfoResponse, NodePathRequest, NodePublishVolumeRequest,
    NodeStageVolumeRequest, SnapshotEntry, SnapshotIdRequest, SourceId, VolumeCapability,
    VolumeContentSource, VolumeIdRequest,
};
use crate::status::{CallResult, Code, Status};

/// Client of a driver, with a directory for mounts.
struct SelfTest {
    socket: PathBuf,
    directory: PathBuf,
    node: String,
    /// File system; `None` for block devices.
    fs_type: Option<FsType>,
    random: Random,
}

/// Volume that is published.
struct PublishedVolume {
    id: String,
    staging: PathBuf,
    target: PathBuf,
}

const MIB: i64 = 1 << 20;
/// XFS needs 300 MiB.
const XFS_SIZE_MIB: i64 = 320;
const SIZE_MIB: i64 = 64;
const DATA_LEN: usize = 3 << 20;
/// Time for a call to complete, with all its repetitions.
const CALL_TIME_MAX: Duration = Duration::from_secs(180);
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Runs the test; prints a line for each part.
pub(crate) fn run_self_test(socket: &Path, directory: &Path, seed: u64) -> Result<(), Error> {
    for fs_type in [Some(FsType::Ext4), Some(FsType::Xfs), None] {
        let mut test = SelfTest {
            socket: socket.to_owned(),
            directory: directory.to_owned(),
            node: String::new(),
            fs_type,
            random: Random::new(seed),
        };
        let name = fs_type.map_or("block", FsType::name);
        test.run(name).map_err(|status| Error::remote(format!("{name}: {status}")))?;
        println!("ok {name}");
    }
    Ok(())
}

impl SelfTest {
    fn run(&mut self, name: &str) -> CallResult<()> {
        let info: NodeGetInfoResponse = self.call("Node/NodeGetInfo", &Empty {})?;
        self.node = info.node_id;
        let name = format!("self-test-{name}-{:08x}", self.random.next_u64() >> 32);
        let size = if self.fs_type == Some(FsType::Xfs) { XFS_SIZE_MIB } else { SIZE_MIB } * MIB;
        let (first, second) = (self.data(), self.data());
        let volume = self.create(&name, size, None)?;
        let published = self.publish(&volume, "volume")?;
        self.write(&published, &first)?;
        let snapshot = self.snapshot(&volume, &format!("{name}-snapshot"))?;
        self.write(&published, &second)?;
        let larger = match self.fs_type == Some(FsType::Ext4) && !may_grow_ext4() {
            true => {
                println!(
                    "note: ext4 does not grow while it is mounted: CAP_SYS_RESOURCE is missing"
                );
                size
            }
            false => 2 * size,
        };
        let clone = self.create(&format!("{name}-clone"), larger, Some(&snapshot))?;
        let cloned = self.publish(&clone, "clone")?;
        self.compare(&cloned, &first, "clone")?;
        self.check_size(&cloned, larger)?;
        self.expand(&published, larger)?;
        self.check_size(&published, larger)?;
        self.compare(&published, &second, "expanded volume")?;
        // What was written is there when the volume is staged again.
        self.unpublish(&published)?;
        let published = self.publish(&volume, "volume")?;
        self.compare(&published, &second, "volume that was staged again")?;
        for volume in [published, cloned] {
            self.unpublish(&volume)?;
            let request = VolumeIdRequest { volume_id: volume.id.clone() };
            let _: Empty = self.call("Controller/DeleteVolume", &request)?;
        }
        let request = SnapshotIdRequest { snapshot_id: snapshot };
        let _: Empty = self.call("Controller/DeleteSnapshot", &request)?;
        Ok(())
    }

    /// Calls the driver, again while it is not there or another call is in progress.
    fn call<R: Message, T: Message + Default>(&self, method: &str, request: &R) -> CallResult<T> {
        let begun = Instant::now();
        loop {
            match call(&self.socket, method, &request.encode_to_vec()) {
                Ok(bytes) => {
                    return T::decode(bytes.as_slice())
                        .map_err(|error| Status::internal(format!("{method}: {error}")));
                }
                Err(status)
                    if matches!(status.code, Code::Unavailable | Code::Aborted)
                        && begun.elapsed() < CALL_TIME_MAX =>
                {
                    sleep(RETRY_INTERVAL);
                }
                Err(status) => {
                    let text = format!("{method}: {}", status.message);
                    return Err(Status::new(status.code, text));
                }
            }
        }
    }

    fn data(&mut self) -> Vec<u8> {
        let mut words = Vec::with_capacity(DATA_LEN);
        while words.len() < DATA_LEN {
            words.extend(self.random.next_u64().to_le_bytes());
        }
        words
    }

    fn capability(&self) -> Option<VolumeCapability> {
        let mount = |fs_type: FsType| MountVolume {
            fs_type: fs_type.name().to_owned(),
            mount_flags: Vec::new(),
        };
        Some(VolumeCapability {
            block: self.fs_type.is_none().then_some(Empty {}),
            mount: self.fs_type.map(mount),
            access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter as i32 }),
        })
    }

    fn create(&self, name: &str, size: i64, snapshot: Option<&str>) -> CallResult<String> {
        let source = |id: &str| VolumeContentSource {
            snapshot: Some(SourceId { id: id.to_owned() }),
            volume: None,
        };
        let request = CreateVolumeRequest {
            name: name.to_owned(),
            capacity_range: Some(CapacityRange { required_bytes: size, limit_bytes: 0 }),
            volume_capabilities: self.capability().into_iter().collect(),
            volume_content_source: snapshot.map(source),
            ..CreateVolumeRequest::default()
        };
        let response: CreateVolumeResponse = self.call("Controller/CreateVolume", &request)?;
        let volume = response.volume.ok_or_else(|| Status::internal("CreateVolume: no volume"))?;
        match volume.capacity_bytes == size {
            true => Ok(volume.volume_id),
            false => {
                let text =
                    format!("CreateVolume: {} bytes, expected {size}", volume.capacity_bytes);
                Err(Status::internal(text))
            }
        }
    }

    fn snapshot(&self, volume: &str, name: &str) -> CallResult<String> {
        let request = CreateSnapshotRequest {
            source_volume_id: volume.to_owned(),
            name: name.to_owned(),
            ..CreateSnapshotRequest::default()
        };
        let response: SnapshotEntry = self.call("Controller/CreateSnapshot", &request)?;
        let snapshot = response.snapshot.ok_or_else(|| Status::internal("CreateSnapshot: none"))?;
        Ok(snapshot.snapshot_id)
    }

    fn publish(&self, volume: &str, name: &str) -> CallResult<PublishedVolume> {
        let request = ControllerPublishVolumeRequest {
            volume_id: volume.to_owned(),
            node_id: self.node.clone(),
            volume_capability: self.capability(),
            readonly: false,
        };
        let response: ControllerPublishVolumeResponse =
            self.call("Controller/ControllerPublishVolume", &request)?;
        let staging = self.directory.join(format!("{name}-staging"));
        let target = self.directory.join(format!("{name}-target"));
        let request = NodeStageVolumeRequest {
            volume_id: volume.to_owned(),
            publish_context: response.publish_context,
            staging_target_path: staging.display().to_string(),
            volume_capability: self.capability(),
        };
        let _: Empty = self.call("Node/NodeStageVolume", &request)?;
        let request = NodePublishVolumeRequest {
            volume_id: volume.to_owned(),
            staging_target_path: staging.display().to_string(),
            target_path: target.display().to_string(),
            volume_capability: self.capability(),
            readonly: false,
        };
        let _: Empty = self.call("Node/NodePublishVolume", &request)?;
        Ok(PublishedVolume { id: volume.to_owned(), staging, target })
    }

    fn unpublish(&self, volume: &PublishedVolume) -> CallResult<()> {
        let request = |path: &Path| NodePathRequest {
            volume_id: volume.id.clone(),
            path: path.display().to_string(),
        };
        let _: Empty = self.call("Node/NodeUnpublishVolume", &request(&volume.target))?;
        let _: Empty = self.call("Node/NodeUnstageVolume", &request(&volume.staging))?;
        let request = ControllerUnpublishVolumeRequest {
            volume_id: volume.id.clone(),
            node_id: self.node.clone(),
        };
        let _: Empty = self.call("Controller/ControllerUnpublishVolume", &request)?;
        // The orchestrator has made it in other cases.
        let _ = std::fs::remove_dir(&volume.staging);
        Ok(())
    }

    fn expand(&self, volume: &PublishedVolume, size: i64) -> CallResult<()> {
        let capacity_range = Some(CapacityRange { required_bytes: size, limit_bytes: 0 });
        let request = ControllerExpandVolumeRequest {
            volume_id: volume.id.clone(),
            capacity_range,
            volume_capability: self.capability(),
        };
        let _: ControllerExpandVolumeResponse =
            self.call("Controller/ControllerExpandVolume", &request)?;
        let request = NodeExpandVolumeRequest {
            volume_id: volume.id.clone(),
            volume_path: volume.target.display().to_string(),
            capacity_range,
            volume_capability: self.capability(),
        };
        let _: NodeExpandVolumeResponse = self.call("Node/NodeExpandVolume", &request)?;
        Ok(())
    }

    /// The file of a file system, or the device node.
    fn file(&self, volume: &PublishedVolume) -> PathBuf {
        match self.fs_type {
            Some(_) => volume.target.join("data"),
            None => volume.target.clone(),
        }
    }

    fn write(&self, volume: &PublishedVolume, data: &[u8]) -> CallResult<()> {
        use std::io::Write;
        let path = self.file(volume);
        let opened =
            std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let written = opened.and_then(|mut file| {
            file.write_all(data)?;
            file.sync_all()
        });
        written.map_err(|error| Status::internal(format!("write {}: {error}", path.display())))
    }

    fn compare(&self, volume: &PublishedVolume, expected: &[u8], what: &str) -> CallResult<()> {
        use std::io::Read;
        let path = self.file(volume);
        let mut found = vec![0; expected.len()];
        std::fs::File::open(&path)
            .and_then(|mut file| file.read_exact(&mut found))
            .map_err(|error| Status::internal(format!("read {}: {error}", path.display())))?;
        match found == expected {
            true => Ok(()),
            false => Err(Status::internal(format!("{what}: other data than were written"))),
        }
    }

    /// Checks that a file system has most of the bytes of its device, or a device all.
    fn check_size(&self, volume: &PublishedVolume, expected: i64) -> CallResult<()> {
        use std::io::{Seek, SeekFrom};
        let path = &volume.target;
        let failed = |error: std::io::Error| {
            Status::internal(format!("size of {}: {error}", path.display()))
        };
        let (found, least) = match self.fs_type {
            Some(_) => {
                let found = rustix::fs::statvfs(path).map_err(|error| failed(error.into()))?;
                (found.f_blocks * found.f_frsize, expected / 4 * 3)
            }
            None => {
                let found = std::fs::File::open(path).and_then(|mut it| it.seek(SeekFrom::End(0)));
                (found.map_err(failed)?, expected)
            }
        };
        match i64::try_from(found).is_ok_and(|found| found >= least) {
            true => Ok(()),
            false => Err(Status::internal(format!(
                "{}: {found} bytes, expected {expected}",
                path.display()
            ))),
        }
    }
}

/// Whether the kernel lets this process grow a mounted ext4: it needs CAP_SYS_RESOURCE (24).
fn may_grow_ext4() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let capabilities = line.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    capabilities.is_some_and(|capabilities| capabilities >> 24 & 1 == 1)
}
