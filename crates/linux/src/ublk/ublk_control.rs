//! `/dev/ublk-control`: creating, starting, recovering and deleting devices.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tenmil_base::{ErrorCategory, Span};
use tenmil_wire::ublk::{ControlCommand, ControlOp};

use super::errno_of;
use crate::kernel_files::KernelFiles;

/// Open control device, for one command at a time.
pub struct UblkControl {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    file: OwnedFd,
    /// Buffer for the commands' payload. `None` after a command whose completion was not awaited:
    /// the kernel may still write to the leaked buffer.
    payload: Option<Box<[u8; PAYLOAD_BYTES_MAX]>>,
}

/// The control device is not available.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlError {
    /// The device node does not exist.
    Missing {
        /// Whether the kernel module is loaded.
        is_loaded: bool,
    },
    /// This user may not open it.
    Denied {
        /// User identifier.
        uid: u32,
        /// Owner and mode of the node.
        owner: Option<FileOwner>,
    },
    /// Error of the open.
    Open(Errno),
    /// Error of creating the ring for commands.
    Ring(Errno),
}

/// Owner and mode of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileOwner {
    /// User identifier.
    pub uid: u32,
    /// Group identifier.
    pub gid: u32,
    /// Mode bits.
    pub mode: u32,
}

/// Path of the node, without the leading slash.
pub const CONTROL: &str = "dev/ublk-control";
/// Maximum payload of a command.
const PAYLOAD_BYTES_MAX: usize = 128;

impl UblkControl {
    /// Opens the control device of `machine`.
    ///
    /// # Errors
    ///
    /// The reason why it is not available.
    pub fn open(machine: &KernelFiles) -> Result<Self, ControlError> {
        let path = machine.path_of(CONTROL);
        let file = rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let file = file.map_err(|errno| match errno {
            Errno::NOENT | Errno::NXIO | Errno::NODEV => {
                ControlError::Missing { is_loaded: machine.exists("sys/module/ublk_drv") }
            }
            Errno::ACCESS | Errno::PERM => {
                let found = std::fs::metadata(&path).ok();
                let owner = found.map(|found| FileOwner {
                    uid: found.uid(),
                    gid: found.gid(),
                    mode: found.mode() & 0o777,
                });
                ControlError::Denied { uid: rustix::process::geteuid().as_raw(), owner }
            }
            errno => ControlError::Open(errno),
        })?;
        let ring =
            IoUring::builder().build(2).map_err(|error| ControlError::Ring(errno_of(&error)))?;
        Ok(Self { ring, file, payload: Some(Box::new([0; PAYLOAD_BYTES_MAX])) })
    }

    /// Executes one command for `device` and waits for its completion. `bytes`, at most 64, is its
    /// input and output payload.
    ///
    /// # Errors
    ///
    /// The kernel's error; `TIMEDOUT` if the command has not completed within `time_limit`. After a
    /// timeout, or a failed wait, no further command is possible.
    pub fn execute(
        &mut self,
        op: ControlOp,
        (device, data): (u32, u64),
        bytes: &mut [u8],
        time_limit: Span,
    ) -> Result<i32, Errno> {
        let room = self.payload.as_mut().ok_or(Errno::TIMEDOUT)?;
        let len_bytes = u16::try_from(bytes.len()).map_err(|_| Errno::INVAL)?;
        room.get_mut(..bytes.len()).ok_or(Errno::INVAL)?.copy_from_slice(bytes);
        let address = if bytes.is_empty() { 0 } else { room.as_mut_ptr() as u64 };
        let command =
            ControlCommand { len_bytes, address, data, ..ControlCommand::for_device(device) };
        let mut area = [0; 80];
        area[..tenmil_wire::ublk::control::COMMAND_BYTES].copy_from_slice(&command.to_bytes());
        let file = types::Fd(self.file.as_raw_fd());
        let entry = opcode::UringCmd80::new(file, op.code()).cmd(area).build();
        // SAFETY: the entry names the control descriptor, which is open as long as the ring, and
        // `room`, a heap allocation that is neither freed nor accessed until the kernel's
        // completion: when the wait is given up, it is leaked.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(|_| Errno::BUSY)?;
        let waited = self.wait_for_result(time_limit);
        if waited.is_err() {
            self.payload.take().map(Box::leak);
        }
        let result = waited?;
        if let Some(room) = &self.payload {
            bytes.copy_from_slice(&room[..bytes.len()]);
        }
        if result < 0 { Err(Errno::from_raw_os_error(-result)) } else { Ok(result) }
    }

    /// Waits for the kernel's result, or returns why it is unknown.
    fn wait_for_result(&mut self, time_limit: Span) -> Result<i32, Errno> {
        let until = Instant::now() + Duration::from_nanos(time_limit.ns);
        loop {
            if let Some(entry) = self.ring.completion().next() {
                return Ok(entry.result());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Errno::TIMEDOUT);
            }
            let left = types::Timespec::from(left);
            let arguments = types::SubmitArgs::new().timespec(&left);
            match self.ring.submitter().submit_with_args(1, &arguments) {
                Ok(_) => {}
                Err(error) if is_wait_repeatable(&error) => {}
                Err(error) => return Err(errno_of(&error)),
            }
        }
    }
}

/// Whether a wait ended by a timeout, a signal or a busy kernel, so that it can be repeated.
fn is_wait_repeatable(error: &io::Error) -> bool {
    matches!(errno_of(error), Errno::TIME | Errno::INTR | Errno::AGAIN | Errno::BUSY)
}

impl ControlError {
    /// Error category.
    pub const fn category(&self) -> ErrorCategory {
        ErrorCategory::Environment
    }

    /// Fix, if known.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Missing { is_loaded: false } => Some(
                "load the module: sudo modprobe ublk_drv (Linux 6.5 or newer, with \
                 CONFIG_BLK_DEV_UBLK)"
                    .to_owned(),
            ),
            Self::Missing { is_loaded: true } => {
                Some("give this container the host's /dev, or run outside of it".to_owned())
            }
            Self::Denied { .. } => Some(
                "run it as root, with sudo: membership in a group is not enough, since the kernel \
                 lets only CAP_SYS_ADMIN serve a disk by user copy"
                    .to_owned(),
            ),
            Self::Ring(_) => Some(
                "allow io_uring: sudo sysctl kernel.io_uring_disabled=0, or a seccomp profile that \
                 lets it pass"
                    .to_owned(),
            ),
            Self::Open(_) => None,
        }
    }
}

impl fmt::Display for ControlError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "open /{CONTROL}: ")?;
        match self {
            Self::Missing { is_loaded: false } => {
                out.write_str("it is not there, expected the kernel to have ublk_drv")
            }
            Self::Missing { is_loaded: true } => {
                out.write_str("it is not there, though the kernel has ublk_drv")
            }
            Self::Denied { uid, owner: Some(FileOwner { uid: of, gid, mode }) } => write!(
                out,
                "user {uid} may not, it is of user {of} and group {gid} with mode {mode:04o}"
            ),
            Self::Denied { uid, owner: None } => write!(out, "user {uid} may not"),
            Self::Open(errno) => write!(out, "{errno}"),
            Self::Ring(errno) => write!(out, "the kernel refuses io_uring: {errno}"),
        }
    }
}

impl std::error::Error for ControlError {}

impl From<ControlError> for tenmil_base::Error {
    fn from(why: ControlError) -> Self {
        Self { category: why.category(), text: why.to_string(), hint: why.hint() }
    }
}

impl fmt::Debug for UblkControl {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Control").field("file", &self.file).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;
    use tenmil_base::Span;
    use tenmil_wire::ublk::ControlOp;

    use super::{ControlError, FileOwner, UblkControl};
    use crate::kernel_files::KernelFiles;

    #[test]
    fn missing_module_and_missing_control_file_are_distinguished() {
        let root = tempfile::tempdir().unwrap();
        let machine = KernelFiles::under_root(root.path());
        let refused = UblkControl::open(&machine).unwrap_err();
        assert_eq!(refused, ControlError::Missing { is_loaded: false });
        assert!(refused.hint().unwrap().contains("modprobe ublk_drv"));
        std::fs::create_dir_all(root.path().join("sys/module/ublk_drv")).unwrap();
        let refused = UblkControl::open(&machine).unwrap_err();
        assert_eq!(refused, ControlError::Missing { is_loaded: true });
        assert!(refused.hint().unwrap().contains("/dev"));
    }

    #[test]
    fn permission_error_names_the_file_its_owner_and_the_fix() {
        let owner = Some(FileOwner { uid: 0, gid: 6, mode: 0o660 });
        let refused = ControlError::Denied { uid: 1000, owner };
        let text = refused.to_string();
        assert!(text.starts_with("open /dev/ublk-control: user 1000 may not"), "{text}");
        assert!(text.contains("group 6") && text.contains("0660"), "{text}");
        assert!(refused.hint().unwrap().contains("root"));
    }

    /// A regular file in place of the control device.
    fn non_ublk_control_file() -> Option<(tempfile::TempDir, UblkControl)> {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("dev")).unwrap();
        std::fs::write(root.path().join("dev/ublk-control"), b"").unwrap();
        match UblkControl::open(&KernelFiles::under_root(root.path())) {
            Ok(control) => Some((root, control)),
            Err(ControlError::Ring(errno)) => {
                println!("skipped: io_uring is not allowed here: {errno}");
                None
            }
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn busy_control_device_is_reported_and_can_be_retried() {
        let Some((_root, mut control)) = non_ublk_control_file() else { return };
        let mut bytes = [7; 8];
        for _ in 0..3 {
            let answer =
                control.execute(ControlOp::GetFeatures, (0, 0), &mut bytes, Span::from_secs(10));
            assert!(answer.is_err_and(|errno| errno != Errno::TIMEDOUT), "{answer:?}");
            assert_eq!(bytes, [7; 8], "the buffer is unchanged");
        }
        let mut long = [0; 129];
        let refused =
            control.execute(ControlOp::GetFeatures, (0, 0), &mut long, Span::from_secs(10));
        assert_eq!(refused, Err(Errno::INVAL));
    }

    #[test]
    fn control_with_an_unknown_result_is_not_used_again() {
        let Some((_root, mut control)) = non_ublk_control_file() else { return };
        let asked = control.execute(ControlOp::GetFeatures, (0, 0), &mut [0; 8], Span::default());
        assert_eq!(asked, Err(Errno::TIMEDOUT));
        let again = control.execute(ControlOp::GetFeatures, (0, 0), &mut [], Span::from_secs(10));
        assert_eq!(again, Err(Errno::TIMEDOUT));
    }
}
