//! Attachments: a volume over NVMe/TCP becomes a block device of the node.

mod disk_server;
mod kernel_nvme;

use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use self::disk_server::DiskServers;
use self::kernel_nvme::KernelNvme;
use crate::connection::Connection;
use crate::options::AttachMethod;
use crate::status::{CallResult, Code, Status};

/// How this node attaches volumes.
#[derive(Clone, Debug)]
pub(crate) struct Attachments {
    method: AttachMethod,
    kernel: KernelNvme,
    disks: DiskServers,
}

/// Time limit for a device to appear, and to have a new size.
const DEVICE_TIME_MAX: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

impl Attachments {
    pub(crate) fn new(
        method: AttachMethod,
        queues: u32,
        ctrl_loss_timeout_s: u32,
        disk_server: PathBuf,
        state: PathBuf,
    ) -> Self {
        let kernel = KernelNvme::new(queues, ctrl_loss_timeout_s);
        Self { method, kernel, disks: DiskServers::new(disk_server, state) }
    }

    /// Starts the servers of disks again that the end of the driver has ended. Returns what could not be started.
    pub(crate) fn restart_disks(&self) -> Vec<String> {
        self.disks.restart_all()
    }

    /// Why no volume can be attached here.
    pub(crate) fn problem(&self) -> Option<String> {
        let (kernel, disks) = (self.kernel.problem(), self.disks.problem());
        match (self.method, kernel, disks) {
            (AttachMethod::Kernel, problem, _) | (AttachMethod::Ublk, _, problem) => problem,
            (AttachMethod::Auto, Some(kernel), Some(disks)) => {
                Some(format!("no way to attach volumes on this node: {kernel}; {disks}"))
            }
            (AttachMethod::Auto, ..) => None,
        }
    }

    fn uses_kernel(&self) -> bool {
        match self.method {
            AttachMethod::Kernel => true,
            AttachMethod::Ublk => false,
            AttachMethod::Auto => self.kernel.problem().is_none(),
        }
    }

    pub(crate) fn attached_device(&self, nqn: &str) -> CallResult<Option<PathBuf>> {
        match self.uses_kernel() {
            true => self.kernel.attached_device(nqn),
            false => self.disks.attached_device(nqn),
        }
    }

    pub(crate) fn attach(&self, connection: &Connection) -> CallResult<PathBuf> {
        match self.uses_kernel() {
            true => self.kernel.attach(connection),
            false => self.disks.attach(connection),
        }
    }

    pub(crate) fn detach(&self, nqn: &str) -> CallResult<()> {
        match self.uses_kernel() {
            true => self.kernel.detach(nqn),
            false => self.disks.detach(nqn),
        }
    }

    /// Size of a device, once it has at least `size_bytes`. The kernel reads the size again when the target
    /// notifies it.
    pub(crate) fn wait_for_size(&self, device: &Path, size_bytes: u64) -> CallResult<u64> {
        let begun = Instant::now();
        loop {
            let found = device_size(device)?;
            if found >= size_bytes {
                return Ok(found);
            }
            if begun.elapsed() > DEVICE_TIME_MAX {
                let hint = match self.uses_kernel() {
                    true => "",
                    false => "; a disk of ublk has its new size when the volume is staged again",
                };
                let (path, seconds) = (device.display(), DEVICE_TIME_MAX.as_secs());
                let text =
                    format!("{path}: {found} bytes after {seconds} s, expected {size_bytes}{hint}");
                return Err(Status::new(Code::DeadlineExceeded, text));
            }
            sleep(POLL_INTERVAL);
        }
    }
}

/// Size of a block device.
fn device_size(device: &Path) -> CallResult<u64> {
    use std::io::{Seek, SeekFrom};
    let size = std::fs::File::open(device).and_then(|mut file| file.seek(SeekFrom::End(0)));
    size.map_err(|error| Status::internal(format!("size of {}: {error}", device.display())))
}
