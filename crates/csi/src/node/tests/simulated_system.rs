//! Operating system in memory, with one volume.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::capabilities::FsType;
use crate::connection::Connection;
use crate::node_system::{Device, FileSystemUsage, Mount, NodeSystem};
use crate::status::{CallResult, Code, Status};

const DEVICE: &str = "/dev/nvme0n1";
const NUMBER: &str = "259:1";

/// System, and the step at which the driver is killed.
#[derive(Clone, Debug)]
pub(super) struct SimulatedSystem {
    nqn: String,
    pub(super) state: SystemState,
    /// Number of the step from now on; `None` when it was cut.
    pub(super) cut: Option<(u32, Cut)>,
    pub(super) problem: Option<String>,
}

/// Moment at which the driver is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    Before,
    /// A file system is made in part; other steps are done whole or not at all.
    During,
    After,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SystemState {
    size_bytes: u64,
    pub(super) content: Content,
    is_attached: bool,
    is_formatting: bool,
    pub(super) mounts: Vec<Mount>,
    paths: BTreeSet<PathBuf>,
    /// Whether a file system that was made in part has a signature.
    pub(super) shows_partial: bool,
}

/// Content of the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    Empty,
    /// A file system that was made in part, and cannot be mounted.
    Partial(&'static str),
    FileSystem {
        name: &'static str,
        size_bytes: u64,
        data: u64,
    },
    Other,
}

impl SimulatedSystem {
    pub(super) fn new(nqn: &str, size_bytes: u64) -> Self {
        let state = SystemState {
            size_bytes,
            content: Content::Empty,
            is_attached: false,
            is_formatting: false,
            mounts: Vec::new(),
            paths: BTreeSet::new(),
            shows_partial: false,
        };
        Self { nqn: nqn.to_owned(), state, cut: None, problem: None }
    }

    /// A program writes to the file system, if there is one.
    pub(super) fn write_data(&mut self, new: u64) {
        if let Content::FileSystem { data, .. } = &mut self.state.content {
            *data = new;
        }
    }

    pub(super) fn data(&self) -> Option<u64> {
        match self.state.content {
            Content::FileSystem { data, .. } => Some(data),
            _ => None,
        }
    }

    pub(super) fn exists(&self, path: &Path) -> bool {
        self.state.paths.contains(path)
    }

    fn step<T>(
        &mut self,
        run: impl FnOnce(&mut SystemState) -> CallResult<T>,
        run_in_part: impl FnOnce(&mut SystemState),
    ) -> CallResult<T> {
        match &mut self.cut {
            Some((1, cut)) => {
                let cut = *cut;
                self.cut = None;
                match cut {
                    Cut::Before => {}
                    Cut::During => run_in_part(&mut self.state),
                    Cut::After => {
                        run(&mut self.state)?;
                    }
                }
                Err(Status::new(Code::Unavailable, "killed"))
            }
            Some((rest, _)) => {
                *rest -= 1;
                run(&mut self.state)
            }
            None => run(&mut self.state),
        }
    }

    fn whole_step<T>(
        &mut self,
        run: impl FnOnce(&mut SystemState) -> CallResult<T>,
    ) -> CallResult<T> {
        self.step(run, |_| {})
    }
}

fn device() -> Device {
    Device { path: DEVICE.into(), number: NUMBER.to_owned() }
}

impl SystemState {
    fn check_device(&self) -> CallResult<()> {
        self.is_attached.then_some(()).ok_or_else(|| Status::internal("the device is gone"))
    }

    fn mount_at(&mut self, target: &Path) -> CallResult<&mut Mount> {
        let found = self.mounts.iter_mut().rfind(|mount| mount.target == target);
        found.ok_or_else(|| Status::internal(format!("{}: not mounted", target.display())))
    }
}

impl NodeSystem for SimulatedSystem {
    fn attachment_problem(&mut self) -> Option<String> {
        self.problem.clone()
    }

    fn attached_device(&mut self, nqn: &str) -> CallResult<Option<Device>> {
        assert_eq!(nqn, self.nqn);
        self.whole_step(|state| Ok(state.is_attached.then(device)))
    }

    fn attach(&mut self, connection: &Connection) -> CallResult<Device> {
        assert_eq!(connection.nqn, self.nqn);
        self.whole_step(|state| {
            state.is_attached = true;
            Ok(device())
        })
    }

    fn detach(&mut self, nqn: &str) -> CallResult<()> {
        assert_eq!(nqn, self.nqn);
        self.whole_step(|state| {
            assert_eq!(state.mounts, [], "a device that is mounted is not detached");
            state.is_attached = false;
            Ok(())
        })
    }

    fn wait_for_size(&mut self, _: &Device, size_bytes: u64) -> CallResult<u64> {
        self.whole_step(|state| match state.size_bytes >= size_bytes {
            true => Ok(state.size_bytes),
            false => Err(Status::new(Code::DeadlineExceeded, "it has not grown")),
        })
    }

    fn content(&mut self, _: &Device) -> CallResult<Option<String>> {
        self.whole_step(|state| {
            state.check_device()?;
            Ok(match state.content {
                Content::Empty => None,
                Content::Partial(name) => state.shows_partial.then(|| name.to_owned()),
                Content::FileSystem { name, .. } => Some(name.to_owned()),
                Content::Other => Some("a partition table (gpt)".to_owned()),
            })
        })
    }

    fn set_formatting(&mut self, _: &str, is_formatting: bool) -> CallResult<()> {
        self.whole_step(|state| {
            state.is_formatting = is_formatting;
            Ok(())
        })
    }

    fn is_formatting(&mut self, _: &str) -> CallResult<bool> {
        self.whole_step(|state| Ok(state.is_formatting))
    }

    fn make_file_system(&mut self, _: &Device, fs_type: FsType) -> CallResult<()> {
        let name = fs_type.name();
        self.step(
            |state| {
                state.check_device()?;
                let size_bytes = state.size_bytes;
                state.content = Content::FileSystem { name, size_bytes, data: 0 };
                Ok(())
            },
            |state| state.content = Content::Partial(name),
        )
    }

    fn check_file_system(&mut self, _: &Device, fs_type: FsType) -> CallResult<()> {
        self.whole_step(|state| match state.content {
            Content::FileSystem { name, .. } if name == fs_type.name() => Ok(()),
            _ => Err(Status::failed_precondition("no file system")),
        })
    }

    fn grow_file_system(&mut self, _: &Device, _: FsType, mount_point: &Path) -> CallResult<()> {
        self.whole_step(|state| {
            let size = state.size_bytes;
            let is_read_only = state.mount_at(mount_point)?.is_read_only;
            match &mut state.content {
                Content::FileSystem { size_bytes, .. } if !is_read_only => *size_bytes = size,
                _ => return Err(Status::internal("it cannot grow")),
            }
            Ok(())
        })
    }

    fn mounts(&mut self) -> CallResult<Vec<Mount>> {
        self.whole_step(|state| Ok(state.mounts.clone()))
    }

    fn mount(
        &mut self,
        _: &Device,
        target: &Path,
        fs_type: FsType,
        flags: &[String],
    ) -> CallResult<()> {
        let is_read_only = flags.iter().any(|flag| flag == "ro");
        self.whole_step(|state| {
            state.check_device()?;
            let is_whole =
                matches!(state.content, Content::FileSystem { name, .. } if name == fs_type.name());
            if !is_whole || !state.paths.contains(target) {
                return Err(Status::internal("mount: exit status 32"));
            }
            state.mounts.push(Mount {
                target: target.to_owned(),
                device: NUMBER.to_owned(),
                is_read_only,
                fs_type: Some(fs_type.name().to_owned()),
            });
            Ok(())
        })
    }

    fn bind_mount(&mut self, source: &Path, target: &Path) -> CallResult<()> {
        self.whole_step(|state| {
            if !state.paths.contains(target) {
                return Err(Status::internal("mount: exit status 32"));
            }
            let fs_type = match source == Path::new(DEVICE) {
                true => None,
                false => state.mount_at(source)?.fs_type.clone(),
            };
            let (target, device) = (target.to_owned(), NUMBER.to_owned());
            state.mounts.push(Mount { target, device, is_read_only: false, fs_type });
            Ok(())
        })
    }

    fn remount_read_only(&mut self, target: &Path) -> CallResult<()> {
        self.whole_step(|state| {
            state.mount_at(target)?.is_read_only = true;
            Ok(())
        })
    }

    fn unmount(&mut self, target: &Path) -> CallResult<()> {
        self.whole_step(|state| {
            state.mount_at(target)?;
            let place = state.mounts.iter().rposition(|mount| mount.target == target);
            place.map(|place| state.mounts.remove(place));
            Ok(())
        })
    }

    fn resolve(&mut self, path: &Path) -> PathBuf {
        path.to_owned()
    }

    fn create_directory(&mut self, path: &Path) -> CallResult<()> {
        self.whole_step(|state| {
            state.paths.insert(path.to_owned());
            Ok(())
        })
    }

    fn create_file(&mut self, path: &Path) -> CallResult<()> {
        self.create_directory(path)
    }

    fn remove(&mut self, path: &Path) -> CallResult<()> {
        self.whole_step(|state| {
            if state.mounts.iter().any(|mount| mount.target == path) {
                return Err(Status::internal("remove: the device is busy"));
            }
            state.paths.remove(path);
            Ok(())
        })
    }

    fn file_system_usage(&mut self, path: &Path) -> CallResult<FileSystemUsage> {
        self.whole_step(|state| {
            state.mount_at(path)?;
            Ok(FileSystemUsage { size_bytes: state.size_bytes, ..FileSystemUsage::default() })
        })
    }
}
