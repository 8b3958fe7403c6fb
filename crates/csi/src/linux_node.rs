//! The operating system of a node: Linux, with the programs of its distribution.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::attachment::Attachments;
use crate::capabilities::FsType;
use crate::connection::Connection;
use crate::names::hash_text;
use crate::node_system::{Device, FileSystemUsage, Mount, NodeSystem};
use crate::process_run::{ProcessResult, run_process, run_successfully};
use crate::status::{CallResult, Status};

/// Linux, with a directory for what must be known when the driver is started again.
#[derive(Clone, Debug)]
pub(crate) struct LinuxNode {
    attachments: Attachments,
    state: PathBuf,
}

/// Time limit for mounts and signatures.
const MOUNT_TIME_MAX: Duration = Duration::from_secs(60);
/// Time limit for programs that read or write much of a device.
const FILE_SYSTEM_TIME_MAX: Duration = Duration::from_secs(600);
/// `blkid` has found no signature.
const BLKID_NOTHING: i32 = 2;
/// Highest exit status of `e2fsck` with a file system that is usable: errors were corrected.
const E2FSCK_CORRECTED: i32 = 1;

impl LinuxNode {
    pub(crate) const fn new(attachments: Attachments, state: PathBuf) -> Self {
        Self { attachments, state }
    }

    fn formatting_file(&self, nqn: &str) -> PathBuf {
        self.state.join(format!("formatting-{}", hash_text(nqn, 32)))
    }
}

impl NodeSystem for LinuxNode {
    fn attachment_problem(&mut self) -> Option<String> {
        self.attachments.problem()
    }

    fn attached_device(&mut self, nqn: &str) -> CallResult<Option<Device>> {
        let path = self.attachments.attached_device(nqn)?;
        path.map(device_at).transpose()
    }

    fn attach(&mut self, connection: &Connection) -> CallResult<Device> {
        device_at(self.attachments.attach(connection)?)
    }

    fn detach(&mut self, nqn: &str) -> CallResult<()> {
        self.attachments.detach(nqn)
    }

    fn wait_for_size(&mut self, device: &Device, size_bytes: u64) -> CallResult<u64> {
        self.attachments.wait_for_size(&device.path, size_bytes)
    }

    fn content(&mut self, device: &Device) -> CallResult<Option<String>> {
        let path = device.path.to_string_lossy();
        let arguments = ["-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", &path];
        let ProcessResult { exit_code, stdout, messages } =
            run_process("blkid", &arguments, MOUNT_TIME_MAX)?;
        match exit_code {
            0 => Ok(Some(parse_blkid(&stdout))),
            BLKID_NOTHING => Ok(None),
            code => Err(Status::internal(format!("blkid {path}: exit status {code}: {messages}"))),
        }
    }

    fn set_formatting(&mut self, nqn: &str, is_formatting: bool) -> CallResult<()> {
        let path = self.formatting_file(nqn);
        if !is_formatting {
            return self.remove(&path);
        }
        let created = std::fs::File::create(&path).and_then(|file| {
            file.sync_all()?;
            std::fs::File::open(&self.state)?.sync_all()
        });
        created.map_err(|error| file_error("create", &path, &error))
    }

    fn is_formatting(&mut self, nqn: &str) -> CallResult<bool> {
        let path = self.formatting_file(nqn);
        path.try_exists().map_err(|error| file_error("look at", &path, &error))
    }

    fn make_file_system(&mut self, device: &Device, fs_type: FsType) -> CallResult<()> {
        let path = device.path.to_string_lossy();
        // Nothing is discarded: the device is new.
        let (program, arguments) = match fs_type {
            FsType::Ext4 => ("mkfs.ext4", vec!["-q", "-F", "-m", "0", "-E", "nodiscard", &path]),
            FsType::Xfs => ("mkfs.xfs", vec!["-q", "-f", "-K", &path]),
        };
        run_successfully(program, &arguments, FILE_SYSTEM_TIME_MAX).map(drop)
    }

    fn check_file_system(&mut self, device: &Device, fs_type: FsType) -> CallResult<()> {
        // XFS replays its log when it is mounted, and has no other check at that time.
        if fs_type == FsType::Xfs {
            return Ok(());
        }
        let path = device.path.to_string_lossy();
        let ended = run_process("e2fsck", &["-p", &path], FILE_SYSTEM_TIME_MAX)?;
        if ended.exit_code <= E2FSCK_CORRECTED {
            return Ok(());
        }
        let ProcessResult { exit_code, messages, .. } = ended;
        let text = format!(
            "e2fsck -p {path}: exit status {exit_code}: {messages}; run e2fsck on it without -p"
        );
        Err(Status::failed_precondition(text))
    }

    fn grow_file_system(
        &mut self,
        device: &Device,
        fs_type: FsType,
        mount_point: &Path,
    ) -> CallResult<()> {
        let grown = match fs_type {
            FsType::Ext4 => run_successfully("resize2fs", &[&device.path], FILE_SYSTEM_TIME_MAX),
            FsType::Xfs => run_successfully("xfs_growfs", &[mount_point], FILE_SYSTEM_TIME_MAX),
        };
        grown.map(drop)
    }

    fn mounts(&mut self) -> CallResult<Vec<Mount>> {
        let path = Path::new("/proc/self/mountinfo");
        let text =
            std::fs::read_to_string(path).map_err(|error| file_error("read", path, &error))?;
        let mounts = text.lines().filter_map(parse_mount);
        Ok(mounts
            .map(|(mount, is_of_node)| if is_of_node { of_node(mount) } else { mount })
            .collect())
    }

    fn mount(
        &mut self,
        device: &Device,
        target: &Path,
        fs_type: FsType,
        flags: &[String],
    ) -> CallResult<()> {
        let mut options: Vec<&str> = flags.iter().map(String::as_str).collect();
        if fs_type == FsType::Xfs {
            // A clone has the UUID of its source, which may be mounted, too.
            options.push("nouuid");
        }
        let options = match options.is_empty() {
            true => "defaults".to_owned(),
            false => options.join(","),
        };
        let (path, target) = (device.path.to_string_lossy(), target.to_string_lossy());
        let arguments = ["-t", fs_type.name(), "-o", &options, &path, &target];
        run_successfully("mount", &arguments, MOUNT_TIME_MAX).map(drop)
    }

    fn bind_mount(&mut self, source: &Path, target: &Path) -> CallResult<()> {
        let arguments = [Path::new("--bind"), source, target];
        run_successfully("mount", &arguments, MOUNT_TIME_MAX).map(drop)
    }

    fn remount_read_only(&mut self, target: &Path) -> CallResult<()> {
        let arguments = [Path::new("-o"), Path::new("remount,bind,ro"), target];
        run_successfully("mount", &arguments, MOUNT_TIME_MAX).map(drop)
    }

    fn unmount(&mut self, target: &Path) -> CallResult<()> {
        run_successfully("umount", &[target], MOUNT_TIME_MAX).map(drop)
    }

    fn resolve(&mut self, path: &Path) -> PathBuf {
        if let Ok(whole) = path.canonicalize() {
            return whole;
        }
        // It may not exist yet.
        match (path.parent().map(Path::canonicalize), path.file_name()) {
            (Some(Ok(parent)), Some(name)) => parent.join(name),
            _ => path.to_owned(),
        }
    }

    fn create_directory(&mut self, path: &Path) -> CallResult<()> {
        std::fs::create_dir_all(path).map_err(|error| file_error("create", path, &error))
    }

    fn create_file(&mut self, path: &Path) -> CallResult<()> {
        if let Some(parent) = path.parent() {
            self.create_directory(parent)?;
        }
        let created = std::fs::OpenOptions::new().create(true).append(true).open(path);
        created.map(drop).map_err(|error| file_error("create", path, &error))
    }

    fn remove(&mut self, path: &Path) -> CallResult<()> {
        let removed = match std::fs::symlink_metadata(path) {
            Ok(found) if found.is_dir() => std::fs::remove_dir(path),
            Ok(_) => std::fs::remove_file(path),
            Err(error) => Err(error),
        };
        match removed {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(file_error("remove", path, &error))
            }
            _ => Ok(()),
        }
    }

    fn file_system_usage(&mut self, path: &Path) -> CallResult<FileSystemUsage> {
        let found = rustix::fs::statvfs(path)
            .map_err(|error| file_error("look at", path, &std::io::Error::from(error)))?;
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        Ok(FileSystemUsage {
            size_bytes: bytes(found.f_blocks),
            free_bytes: bytes(found.f_bfree),
            available_bytes: bytes(found.f_bavail),
            inodes: found.f_files,
            free_inodes: found.f_ffree,
        })
    }
}

/// The block device at a path.
fn device_at(path: PathBuf) -> CallResult<Device> {
    let found = std::fs::metadata(&path).map_err(|error| file_error("look at", &path, &error))?;
    if !found.file_type().is_block_device() {
        return Err(Status::internal(format!("{}: no block device", path.display())));
    }
    let number = device_number(found.rdev());
    Ok(Device { path, number })
}

fn device_number(device: u64) -> String {
    format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device))
}

/// Mount of a device node: the device is that of the node, not of its file system.
fn of_node(mount: Mount) -> Mount {
    match std::fs::metadata(&mount.target) {
        Ok(found) if found.file_type().is_block_device() => {
            Mount { device: device_number(found.rdev()), fs_type: None, ..mount }
        }
        _ => mount,
    }
}

/// Parses a line of mountinfo (proc_pid_mountinfo(5)), and whether the mount may be one of a device node: a part
/// of a file system that is not its root.
fn parse_mount(line: &str) -> Option<(Mount, bool)> {
    let (before, after) = line.split_once(" - ")?;
    let mut fields = before.split(' ').skip(2);
    let (device, root, target, options) =
        (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let fs_type = after.split(' ').next()?;
    let mount = Mount {
        target: PathBuf::from(unescape(target)),
        device: device.to_owned(),
        is_read_only: options.split(',').any(|option| option == "ro"),
        fs_type: Some(fs_type.to_owned()),
    };
    Some((mount, root != "/"))
}

/// Replaces `\ooo`: blanks, tabs, line feeds and backslashes.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        let code = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code.filter(|_| *first == b'\\') {
            Some(code) => {
                bytes.push(code);
                rest = &after[3..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Name of the file system, or of the partition table.
fn parse_blkid(text: &str) -> String {
    let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    match (value("TYPE"), value("PTTYPE")) {
        (Some(fs_type), _) => fs_type.to_owned(),
        (None, Some(table)) => format!("a partition table ({table})"),
        (None, None) => "an unknown signature".to_owned(),
    }
}

fn file_error(doing: &str, path: &Path, error: &std::io::Error) -> Status {
    Status::internal(format!("{doing} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::{parse_blkid, parse_mount, unescape};

    #[test]
    fn lines_of_mountinfo_are_parsed() {
        let line =
            "36 35 259:3 / /mnt/a\\040b rw,noatime shared:1 - ext4 /dev/nvme0n1 rw,errors=continue";
        let (mount, is_of_node) = parse_mount(line).unwrap();
        assert_eq!(mount.target.to_str(), Some("/mnt/a b"));
        assert_eq!((mount.device.as_str(), mount.fs_type.as_deref()), ("259:3", Some("ext4")));
        assert!(!mount.is_read_only && !is_of_node);
        let line = "40 35 0:5 /nvme0n1 /mnt/b ro,nosuid - devtmpfs udev rw";
        let (mount, is_of_node) = parse_mount(line).unwrap();
        assert!(mount.is_read_only && is_of_node);
        for cut in ["", "36 35", "36 35 259:3 / /mnt", "36 35 259:3 / /mnt rw"] {
            assert_eq!(parse_mount(cut), None);
        }
        assert_eq!(unescape("\\134\\"), "\\\\");
    }

    #[test]
    fn signatures_are_named() {
        assert_eq!(parse_blkid("DEVNAME=/dev/sda\nTYPE=xfs\n"), "xfs");
        assert_eq!(parse_blkid("DEVNAME=/dev/sda\nPTTYPE=gpt\n"), "a partition table (gpt)");
        assert_eq!(parse_blkid(""), "an unknown signature");
    }
}
