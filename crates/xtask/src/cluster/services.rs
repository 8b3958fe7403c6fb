//! What the gateways use: etcd and a server of devices, or a Ceph cluster.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use super::gateways::Process;
use crate::ceph::cluster::{Cluster, ObjectStore};
use crate::operate::run_program;

/// Kind of the services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServiceKind {
    /// etcd, and devices of another server over NVMe/TCP.
    Etcd,
    /// The same with a pool on each device.
    EtcdWithPools,
    /// A Ceph cluster with images and the store.
    Ceph,
}

/// Running services.
pub(super) enum Services {
    Etcd(EtcdServices),
    Ceph(Cluster),
}

/// etcd and the server of the devices.
pub(super) struct EtcdServices {
    etcd: Process,
    pub(super) etcd_address: SocketAddr,
    _backend: Process,
    backend_address: SocketAddr,
    has_pools: bool,
}

const BACKEND: &str = "nqn.2026-01.org.example:backend";
/// Volume of each pool, and its size.
const VOLUME: &str = "disk";
const VOLUME_SIZE: &str = "4m";
/// Number of devices, one for each ANA group.
pub(super) const DEVICES: u32 = 2;
/// Size of an image: so small that each block is written and read again in every second of the load.
const IMAGE_SIZE: &str = "4m";

impl ServiceKind {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Etcd | Self::EtcdWithPools => "etcd",
            Self::Ceph => "Ceph",
        }
    }
}

impl Services {
    /// Starts the services.
    pub(super) fn start(
        kind: ServiceKind,
        tenmil: &Path,
        directory: &Path,
    ) -> Result<Self, String> {
        match kind {
            ServiceKind::Etcd => EtcdServices::start(tenmil, directory).map(Self::Etcd),
            ServiceKind::EtcdWithPools => {
                let mut services = EtcdServices::start(tenmil, directory)?;
                services.make_pools(tenmil)?;
                Ok(Self::Etcd(services))
            }
            ServiceKind::Ceph => {
                crate::ceph::programs::check_programs()?;
                // Not in the directory of the gateways, which is deleted: it has the pid files of a run that was killed.
                let of_cluster = directory.with_file_name("cluster-ceph");
                let cluster = Cluster::start(&of_cluster, ObjectStore::Memstore)?;
                println!("cluster of {} with memstore", cluster.version());
                for number in 1..=DEVICES {
                    let image = cluster.uri(&format!("disk-{number}"), "");
                    let mut create = Command::new(tenmil);
                    create.args(["volume", "create", &image, "--size", IMAGE_SIZE]);
                    run_program(&mut create)?;
                }
                Ok(Self::Ceph(cluster))
            }
        }
    }

    /// The store of the group, as this program reaches it.
    pub(super) fn store_uri(&self) -> String {
        match self {
            Self::Etcd(services) => format!("etcd:http://{}", services.etcd_address),
            Self::Ceph(cluster) => format!("rados:rbd/group?conf={}", cluster.conf().display()),
        }
    }

    /// Device of an ANA group.
    pub(super) fn device_uri(&self, number: u32) -> String {
        match self {
            Self::Etcd(services) if services.has_pools => {
                format!("volume:[{}]/{VOLUME}", services.device_uri(number))
            }
            Self::Etcd(services) => services.device_uri(number),
            // A gateway that is cut off closes its images within this time.
            Self::Ceph(cluster) => cluster.uri(&format!("disk-{number}"), "&io-timeout=10s"),
        }
    }

    /// Has the store not answer for a time.
    pub(super) fn interrupt_store(
        &mut self,
        directory: &Path,
        time: Duration,
    ) -> Result<(), String> {
        match self {
            Self::Etcd(services) => {
                services.etcd.kill();
                sleep(time);
                services.etcd = start_etcd(directory, services.etcd_address)?;
                Ok(())
            }
            Self::Ceph(cluster) => {
                cluster.signal_osd("STOP")?;
                sleep(time);
                cluster.signal_osd("CONT")
            }
        }
    }

    /// The blocklist of the Ceph cluster.
    pub(super) fn blocklist(&self) -> Result<String, String> {
        match self {
            Self::Etcd(_) => Ok(String::new()),
            Self::Ceph(cluster) => cluster.run("ceph", &["osd", "blocklist", "ls"]),
        }
    }
}

impl EtcdServices {
    fn start(tenmil: &Path, directory: &Path) -> Result<Self, String> {
        if run_program(Command::new("etcd").arg("--version")).is_err() {
            return Err("skipped: no etcd, expected `apt-get install etcd-server`".to_owned());
        }
        let (etcd_address, backend_address) = (free_address()?, free_address()?);
        let etcd = start_etcd(directory, etcd_address)?;
        let mut backend = Command::new(tenmil);
        backend.arg("serve");
        for number in 1..=DEVICES {
            let file = directory.join(format!("disk-{number}"));
            backend.arg(format!("file:{}?size=64m", file.display()));
        }
        backend.args(["--listen", &format!("tcp://{backend_address}"), "--nqn", BACKEND]);
        let backend = Process::start(backend, directory, "backend")?;
        backend.wait_for("ready")?;
        Ok(Self { etcd, etcd_address, _backend: backend, backend_address, has_pools: false })
    }

    fn device_uri(&self, number: u32) -> String {
        format!("tcp://{}/{BACKEND}/{number}", self.backend_address)
    }

    /// Makes a pool with a volume on each device.
    fn make_pools(&mut self, tenmil: &Path) -> Result<(), String> {
        for number in 1..=DEVICES {
            let device = self.device_uri(number);
            let run = |arguments: &[&str]| run_program(Command::new(tenmil).args(arguments));
            run(&["pool", "create", &device, "--overwrite"])?;
            let volume = format!("volume:[{device}]/{VOLUME}");
            run(&["volume", "create", &volume, "--size", VOLUME_SIZE])?;
        }
        self.has_pools = true;
        Ok(())
    }
}

fn start_etcd(directory: &Path, address: SocketAddr) -> Result<Process, String> {
    let (client, peer) = (format!("http://{address}"), format!("http://{}", free_address()?));
    let mut command = Command::new("etcd");
    command.arg("--data-dir").arg(directory.join("etcd")).args(["--name", "a"]);
    command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    command.args(["--initial-cluster", &format!("a={peer}")]);
    let process = Process::start(command, directory, "etcd")?;
    process.wait_for("ready to serve client requests")?;
    Ok(process)
}

/// An address with a port that was free a moment ago.
pub(super) fn free_address() -> Result<SocketAddr, String> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|why| format!("bind: {why}"))?;
    listener.local_addr().map_err(|why| format!("bind: {why}"))
}
