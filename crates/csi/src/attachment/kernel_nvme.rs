//! The nvme-tcp host of the kernel: connections by /dev/nvme-fabrics, devices by sysfs.
//!
//! ```text
//!   /sys/class/nvme/nvme0       subsysnqn, address (traddr=…,trsvcid=…), hostnqn, delete_controller
//!   /sys/block/nvme0n1          device/subsysnqn, nsid           with native multipath the head of all paths
//!   /sys/block/nvme0c0n1        a path of it
//! ```

use std::fs::OpenOptions;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::{DEVICE_TIME_MAX, POLL_INTERVAL, device_size};
use crate::connection::{Connection, NAMESPACE};
use crate::names::host_identifier;
use crate::status::{CallResult, Code, Status};

/// NVMe host of the kernel.
#[derive(Clone, Debug)]
pub(crate) struct KernelNvme {
    sys: PathBuf,
    dev: PathBuf,
    queues: u32,
    ctrl_loss_timeout_s: u32,
}

/// Controller of the kernel: a path to a subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
struct KernelController {
    /// Its directory in sysfs.
    path: PathBuf,
    address: Option<SocketAddr>,
}

/// Time limit for a connection, and for its end.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(60);
/// `EALREADY`: the same connection exists.
const ALREADY_CONNECTED: i32 = 114;

impl KernelNvme {
    pub(super) fn new(queues: u32, ctrl_loss_timeout_s: u32) -> Self {
        let (sys, dev) = ("/sys".into(), "/dev".into());
        Self { sys, dev, queues, ctrl_loss_timeout_s }
    }

    /// Why no volume can be attached.
    pub(super) fn problem(&self) -> Option<String> {
        let fabrics = self.fabrics();
        let has_tcp = self.sys.join("module/nvme_tcp").exists();
        (!fabrics.exists() || !has_tcp).then(|| {
            format!(
                "the kernel's nvme-tcp is not loaded ({} is missing): modprobe nvme-tcp",
                fabrics.display()
            )
        })
    }

    fn fabrics(&self) -> PathBuf {
        self.dev.join("nvme-fabrics")
    }

    /// The device of a namespace: the head of its paths with native multipath.
    pub(super) fn attached_device(&self, nqn: &str) -> CallResult<Option<PathBuf>> {
        for (name, path) in entries(&self.sys.join("block"))? {
            let is_it = is_namespace_name(&name)
                && attribute(&path.join("device/subsysnqn")).as_deref() == Some(nqn)
                && attribute(&path.join("nsid")).is_none_or(|nsid| nsid == NAMESPACE.to_string());
            let device = self.dev.join(&name);
            if is_it && device.exists() {
                return Ok(Some(device));
            }
        }
        Ok(None)
    }

    pub(super) fn attach(&self, connection: &Connection) -> CallResult<PathBuf> {
        let connected = self.controllers(&connection.nqn)?;
        let mut refused = None;
        let mut paths = 0;
        for text in self.addresses(connection) {
            let address: SocketAddr = text.parse().map_err(|_| {
                Status::invalid_argument(format!("address `{text}`, expected ADDRESS:PORT"))
            })?;
            if connected.iter().any(|controller| controller.address == Some(address)) {
                paths += 1;
                continue;
            }
            match self.connect(connection, address) {
                Ok(()) => paths += 1,
                // Another path may be there; the kernel does not try this one again.
                Err(status) => refused = Some(status),
            }
        }
        if let Some(status) = refused {
            if paths == 0 {
                return Err(status);
            }
            eprintln!("{}: a path is missing: {status}", connection.nqn);
        }
        self.wait_for_device(&connection.nqn)
    }

    /// The addresses to connect to: without native multipath each path would be a disk of its own.
    fn addresses<'a>(&self, connection: &'a Connection) -> &'a [String] {
        let multipath = attribute(&self.sys.join("module/nvme_core/parameters/multipath"));
        let has_multipath = multipath.as_deref() == Some("Y");
        let count = if has_multipath { connection.addresses.len() } else { 1 };
        &connection.addresses[..count.min(connection.addresses.len())]
    }

    fn connect(&self, connection: &Connection, address: SocketAddr) -> CallResult<()> {
        let Connection { nqn, host, .. } = connection;
        let options = format!(
            "nqn={nqn},transport=tcp,traddr={},trsvcid={},hostnqn={host},hostid={},nr_io_queues={},\
             ctrl_loss_tmo={}",
            address.ip(),
            address.port(),
            host_identifier(host),
            self.queues,
            self.ctrl_loss_timeout_s,
        );
        let fabrics = self.fabrics();
        let written = write_with_deadline(&fabrics, options, CONNECT_TIME_MAX)?;
        match written {
            Err(error) if error.raw_os_error() != Some(ALREADY_CONNECTED) => {
                Err(Status::unavailable(format!("connect {nqn} at {address}: {error}")))
            }
            _ => Ok(()),
        }
    }

    fn wait_for_device(&self, nqn: &str) -> CallResult<PathBuf> {
        let begun = Instant::now();
        loop {
            // A head whose paths have all been lost has no size until one is connected.
            if let Some(device) = self.attached_device(nqn)?
                && device_size(&device).is_ok()
            {
                return Ok(device);
            }
            if begun.elapsed() > DEVICE_TIME_MAX {
                let seconds = DEVICE_TIME_MAX.as_secs();
                let text = format!("subsystem {nqn}: no namespace {NAMESPACE} after {seconds} s");
                return Err(Status::new(Code::DeadlineExceeded, text));
            }
            sleep(POLL_INTERVAL);
        }
    }

    pub(super) fn detach(&self, nqn: &str) -> CallResult<()> {
        for controller in self.controllers(nqn)? {
            let path = controller.path.join("delete_controller");
            let written = write_with_deadline(&path, "1".to_owned(), CONNECT_TIME_MAX)?;
            if let Err(error) = written
                && path.exists()
            {
                return Err(Status::internal(format!("write {}: {error}", path.display())));
            }
        }
        let begun = Instant::now();
        while !self.controllers(nqn)?.is_empty() {
            if begun.elapsed() > DEVICE_TIME_MAX {
                let text = format!("subsystem {nqn}: still connected");
                return Err(Status::new(Code::DeadlineExceeded, text));
            }
            sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// The controllers of a subsystem.
    fn controllers(&self, nqn: &str) -> CallResult<Vec<KernelController>> {
        let all = entries(&self.sys.join("class/nvme"))?.into_iter();
        let of_subsystem =
            all.filter(|(_, path)| attribute(&path.join("subsysnqn")).as_deref() == Some(nqn));
        let controller = |(_, path): (String, PathBuf)| {
            let address = attribute(&path.join("address")).and_then(|text| parse_address(&text));
            KernelController { path, address }
        };
        Ok(of_subsystem.map(controller).collect())
    }
}

/// Writes to a file of the kernel, which may wait for another machine.
fn write_with_deadline(
    path: &Path,
    text: String,
    time_max: Duration,
) -> CallResult<std::io::Result<()>> {
    let (sender, receiver) = channel();
    let file = path.to_owned();
    std::thread::spawn(move || {
        let opened = OpenOptions::new().read(text != "1").write(true).open(&file);
        // The receiver is gone after the deadline.
        let _ = sender.send(opened.and_then(|mut file| file.write_all(text.as_bytes())));
    });
    receiver.recv_timeout(time_max).map_err(|error| {
        let (path, seconds) = (path.display(), time_max.as_secs());
        match error {
            RecvTimeoutError::Timeout => Status::new(
                Code::DeadlineExceeded,
                format!("write {path}: not ended within {seconds} s"),
            ),
            RecvTimeoutError::Disconnected => Status::internal(format!("write {path}: ended")),
        }
    })
}

/// Whether a block device is a namespace, and not a path of one.
fn is_namespace_name(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let parts = name.strip_prefix("nvme").and_then(|rest| rest.split_once('n'));
    parts.is_some_and(|(instance, namespace)| is_number(instance) && is_number(namespace))
}

/// Parses the attribute `address` of a controller.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let value = |key: &str| text.split(',').find_map(|part| part.strip_prefix(key));
    let (ip, port) = (value("traddr=")?.parse().ok()?, value("trsvcid=")?.parse().ok()?);
    Some(SocketAddr::new(ip, port))
}

/// Entries of a directory of sysfs; none if it does not exist.
fn entries(path: &Path) -> CallResult<Vec<(String, PathBuf)>> {
    let failed =
        |error: std::io::Error| Status::internal(format!("list {}: {error}", path.display()));
    let listed = match std::fs::read_dir(path) {
        Ok(listed) => listed,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut found = Vec::new();
    for entry in listed {
        let entry = entry.map_err(failed)?;
        found.push((entry.file_name().to_string_lossy().into_owned(), entry.path()));
    }
    found.sort();
    Ok(found)
}

/// Attribute of sysfs. `None` if it is gone.
fn attribute(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{KernelNvme, is_namespace_name, parse_address};
    use crate::connection::Connection;

    const NQN: &str = "nqn.2026-01.org.tenmil:csi:0:a";

    fn write(root: &Path, name: &str, text: &str) {
        let path = root.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn host(root: &Path) -> KernelNvme {
        let (sys, dev) = (root.join("sys"), root.join("dev"));
        KernelNvme { sys, dev, queues: 2, ctrl_loss_timeout_s: 30 }
    }

    fn connection() -> Connection {
        Connection {
            nqn: NQN.into(),
            addresses: vec!["192.0.2.1:4420".into(), "192.0.2.2:4420".into()],
            host: "nqn.2014-08.org.example:node".into(),
        }
    }

    #[test]
    fn device_is_the_namespace_of_the_subsystem_and_not_a_path_of_it() {
        let root = tempfile::tempdir().unwrap();
        let host = host(root.path());
        assert_eq!(host.attached_device(NQN), Ok(None));
        for (name, nqn) in [("nvme0n1", "nqn.other"), ("nvme1c1n1", NQN), ("nvme1n1", NQN)] {
            write(root.path(), &format!("sys/block/{name}/device/subsysnqn"), &format!("{nqn}\n"));
            write(root.path(), &format!("sys/block/{name}/nsid"), "1\n");
            write(root.path(), &format!("dev/{name}"), "");
        }
        let found = host.attached_device(NQN).unwrap().unwrap();
        assert_eq!(found, root.path().join("dev/nvme1n1"));
        assert!(is_namespace_name("nvme10n2") && !is_namespace_name("nvme0n1p1"));
    }

    #[test]
    fn paths_that_are_missing_are_connected_and_no_others() {
        let root = tempfile::tempdir().unwrap();
        let host = host(root.path());
        assert!(host.problem().unwrap().contains("modprobe nvme-tcp"));
        write(root.path(), "sys/module/nvme_tcp/x", "");
        write(root.path(), "sys/module/nvme_core/parameters/multipath", "Y\n");
        write(root.path(), "dev/nvme-fabrics", "");
        assert_eq!(host.problem(), None);
        write(root.path(), "sys/class/nvme/nvme1/subsysnqn", NQN);
        write(
            root.path(),
            "sys/class/nvme/nvme1/address",
            "traddr=192.0.2.1,trsvcid=4420,src_addr=192.0.2.9\n",
        );
        write(root.path(), "sys/block/nvme1n1/device/subsysnqn", NQN);
        write(root.path(), "dev/nvme1n1", "");
        assert_eq!(host.attach(&connection()), Ok(root.path().join("dev/nvme1n1")));
        let written = std::fs::read_to_string(root.path().join("dev/nvme-fabrics")).unwrap();
        let expected = format!(
            "nqn={NQN},transport=tcp,traddr=192.0.2.2,trsvcid=4420,hostnqn=nqn.2014-08.org.example:node,hostid="
        );
        assert!(written.starts_with(&expected), "{written}");
        assert!(written.ends_with(",nr_io_queues=2,ctrl_loss_tmo=30"), "{written}");
    }

    #[test]
    fn one_path_is_connected_without_native_multipath() {
        let root = tempfile::tempdir().unwrap();
        let host = host(root.path());
        assert_eq!(host.addresses(&connection()).len(), 1);
        write(root.path(), "sys/module/nvme_core/parameters/multipath", "N\n");
        assert_eq!(host.addresses(&connection()).len(), 1);
        write(root.path(), "sys/module/nvme_core/parameters/multipath", "Y\n");
        assert_eq!(host.addresses(&connection()).len(), 2);
    }

    #[test]
    fn address_of_a_controller_is_parsed() {
        for (text, address) in [
            ("traddr=192.0.2.1,trsvcid=4420", "192.0.2.1:4420"),
            ("traddr=2001:db8::1,trsvcid=8009,src_addr=::1", "[2001:db8::1]:8009"),
        ] {
            assert_eq!(parse_address(text), Some(address.parse().unwrap()));
        }
        assert_eq!(parse_address("0000:5e:00.0"), None);
    }
}
