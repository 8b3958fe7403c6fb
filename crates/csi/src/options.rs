//! Command line.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Parser;
use tenmil_base::Error;
use tenmil_linux::key_file::read_key_file;
use tenmil_nvme_auth::SecretBytes;
use tenmil_rpc::{ControlCertificate, ControlEndpoint, ControlToken, HttpCredentials};

use crate::attachment::Attachments;
use crate::controller::ControllerOptions;
use crate::linux_node::LinuxNode;
use crate::names::is_host_nqn;
use crate::node::NodeOptions;
use crate::service::{CallsInProgress, ControllerService, NodeService, Services};

/// Kubernetes CSI driver for volumes of a tenmil pool.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Examples:
  tenmil-csi --controller --control https://storage.example:9010 --control-ca ca.pem --control-token token
  tenmil-csi --node --node-name worker-1
  tenmil-csi --self-test /mnt --endpoint unix:///csi/csi.sock
Docs: docs/operator/kubernetes.md"
)]
pub(crate) struct DriverOptions {
    /// Socket that the orchestrator calls [default: $CSI_ENDPOINT]
    #[arg(long, value_name = "unix:///PATH")]
    endpoint: Option<String>,

    /// Serve the controller service, which needs the API of a storage server
    #[arg(long)]
    controller: bool,

    /// Serve the node service, which attaches and mounts volumes on this machine
    #[arg(long)]
    node: bool,

    /// Topology of the nodes that can reach the storage server, or of this node
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_segment)]
    topology: Vec<(String, String)>,

    /// Control socket of the storage server, or its URL, https://HOST:PORT [default: $TENMIL_CONTROL]
    #[arg(long, value_name = "PATH", help_heading = "Controller")]
    control: Option<PathBuf>,

    /// Authority that has signed the certificate of the server, a PEM file
    #[arg(long, value_name = "FILE", help_heading = "Controller")]
    control_ca: Option<PathBuf>,

    /// Certificate chain of the driver, a PEM file
    #[arg(long, value_name = "FILE", requires = "control_key", help_heading = "Controller")]
    control_certificate: Option<PathBuf>,

    /// Private key of --control-certificate, a PEM file that only its owner may access
    #[arg(
        long,
        value_name = "FILE",
        requires = "control_certificate",
        help_heading = "Controller"
    )]
    control_key: Option<PathBuf>,

    /// File with the token of the server
    #[arg(long, value_name = "FILE", help_heading = "Controller")]
    control_token: Option<PathBuf>,

    /// Address that nodes connect to, once for each path [default: those of the server's listeners]
    #[arg(long, value_name = "ADDRESS:PORT", help_heading = "Controller")]
    address: Vec<std::net::SocketAddr>,

    /// Name of the node, from which the NQN of the host is made
    #[arg(long, value_name = "NAME", help_heading = "Node")]
    node_name: Option<String>,

    /// NQN of the host, in place of --node-name
    #[arg(long, value_name = "NQN", conflicts_with = "node_name", help_heading = "Node")]
    host_nqn: Option<String>,

    /// Largest number of volumes on this node; 0 for no limit
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Node")]
    volumes_max: u32,

    /// Queues of a connection of the kernel's nvme-tcp
    #[arg(long, value_name = "N", default_value_t = 4, help_heading = "Node")]
    queues: u32,

    /// Time after which the I/O of a volume that cannot be reached fails, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600, help_heading = "Node")]
    ctrl_loss_timeout: u32,

    /// Directory for what the node must know when the driver is started again; it must not survive a boot
    #[arg(
        long,
        value_name = "DIRECTORY",
        default_value = "/run/tenmil-csi",
        help_heading = "Node"
    )]
    state_dir: PathBuf,

    /// How volumes are attached: by the kernel's nvme-tcp, by ublk, or by the first of them that this machine has
    #[arg(long, value_enum, default_value_t, help_heading = "Node")]
    attach: AttachMethod,

    /// Test the driver that serves --endpoint: create, mount, write, clone, expand and delete volumes below this
    /// directory
    #[arg(long, value_name = "DIRECTORY", conflicts_with_all = ["controller", "node"])]
    pub(crate) self_test: Option<PathBuf>,

    /// Seed of the names and data of --self-test
    #[arg(long, value_name = "N", default_value_t = 1, requires = "self_test")]
    pub(crate) seed: u64,

    /// Program that serves a volume as a disk of ublk
    #[arg(long, value_name = "PROGRAM", default_value = "tenmil", help_heading = "Node")]
    disk_server: PathBuf,
}

/// How volumes are attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum AttachMethod {
    /// The first one that this machine has.
    #[default]
    Auto,
    /// The nvme-tcp host of the kernel.
    Kernel,
    /// The program of --disk-server.
    Ublk,
}

const HOST_NQN_PREFIX: &str = "nqn.2026-01.org.tenmil:csi-node:";
const KEY_FILE_MAX: u64 = 64 << 10;

impl DriverOptions {
    /// Path of the socket.
    pub(crate) fn socket_path(&self) -> Result<PathBuf, Error> {
        let variable = || std::env::var("CSI_ENDPOINT").ok();
        let text = self.endpoint.clone().or_else(variable).unwrap_or_default();
        let path = text.strip_prefix("unix://").or_else(|| text.strip_prefix("unix:"));
        let path = path.unwrap_or(&text);
        if !path.starts_with('/') {
            let text = format!("--endpoint: `{text}`, expected unix:///PATH");
            return Err(Error::usage(text));
        }
        Ok(path.into())
    }

    /// The services that are wanted.
    pub(crate) fn services(&self) -> Result<Services, Error> {
        if !self.controller && !self.node {
            return Err(Error::usage("no service, expected --controller, --node or both"));
        }
        let topology: BTreeMap<_, _> = self.topology.iter().cloned().collect();
        let controller = match self.controller {
            true => {
                let addresses = self.address.iter().map(ToString::to_string).collect();
                let options = ControllerOptions { addresses, topology: topology.clone() };
                Some(ControllerService { endpoint: self.control_endpoint()?, options })
            }
            false => None,
        };
        let node = if self.node { Some(self.node_service(topology)?) } else { None };
        Ok(Services { controller, node, calls: CallsInProgress::default() })
    }

    fn node_service(&self, topology: BTreeMap<String, String>) -> Result<NodeService, Error> {
        let host = match (&self.host_nqn, &self.node_name) {
            (Some(nqn), _) => nqn.clone(),
            (None, Some(name)) => format!("{HOST_NQN_PREFIX}{name}"),
            (None, None) => {
                return Err(Error::usage(
                    "no name of the node, expected --node-name or --host-nqn",
                ));
            }
        };
        if !is_host_nqn(&host) {
            return Err(Error::usage(format!(
                "host NQN `{host}`, expected nqn.YYYY-MM.DOMAIN:NAME"
            )));
        }
        let state = &self.state_dir;
        std::fs::create_dir_all(state)
            .map_err(|error| Error::environment(format!("create {}: {error}", state.display())))?;
        let attachments = Attachments::new(
            self.attach,
            self.queues,
            self.ctrl_loss_timeout,
            self.disk_server.clone(),
            state.clone(),
        );
        for problem in attachments.restart_disks() {
            eprintln!("{problem}");
        }
        let system = LinuxNode::new(attachments, state.clone());
        let options = NodeOptions { host, topology, volumes_max: self.volumes_max };
        Ok(NodeService { system, options })
    }

    fn control_endpoint(&self) -> Result<ControlEndpoint, Error> {
        let variable = || std::env::var_os("TENMIL_CONTROL").map(PathBuf::from);
        let path = self.control.clone().or_else(variable).ok_or_else(|| {
            Error::usage("no API of a storage server, expected --control PATH or --control https://HOST:PORT")
        })?;
        match path.to_str().filter(|text| ControlEndpoint::is_url(text)) {
            Some(url) => ControlEndpoint::from_url(url, self.credentials()?),
            None => Ok(ControlEndpoint::Socket(path)),
        }
    }

    /// Reads the files of the options for a TCP port.
    fn credentials(&self) -> Result<HttpCredentials, Error> {
        let certificate = match (&self.control_certificate, &self.control_key) {
            (Some(chain), Some(key)) => Some(ControlCertificate {
                chain_pem: read_file(chain)?,
                key_pem: SecretBytes::new(read_secret(key)?),
            }),
            _ => None,
        };
        let token = match &self.control_token {
            Some(path) => {
                let bytes = read_secret(path)?;
                let token = ControlToken::parse(&String::from_utf8_lossy(&bytes));
                let wrong =
                    |why| Error::usage(format!("--control-token {}: {why}", path.display()));
                Some(token.map_err(wrong)?)
            }
            None => None,
        };
        let ca_pem = self.control_ca.as_deref().map(read_file).transpose()?;
        Ok(HttpCredentials { ca_pem, certificate, token })
    }
}

fn parse_segment(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('=').filter(|(key, value)| !key.is_empty() && !value.is_empty());
    let (key, value) = parts.ok_or_else(|| "expected KEY=VALUE".to_owned())?;
    Ok((key.to_owned(), value.to_owned()))
}

fn read_file(path: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(|error| Error::usage(format!("read {}: {error}", path.display())))
}

fn read_secret(path: &Path) -> Result<Vec<u8>, Error> {
    read_key_file(path, KEY_FILE_MAX).map_err(|why| Error::usage(why.to_string()))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::DriverOptions;
    use crate::service::DRIVER_NAME;

    const CONTROLLER: &str = include_str!("../../../packaging/kubernetes/controller.yaml");
    const NODE: &str = include_str!("../../../packaging/kubernetes/node.yaml");
    const CLASSES: &str = include_str!("../../../packaging/kubernetes/classes.yaml");
    const DRIVER: &str = include_str!("../../../packaging/kubernetes/csi-driver.yaml");

    /// Arguments of the container of the driver.
    fn arguments(manifest: &str) -> Vec<&str> {
        let container = manifest.split("image: tenmil-csi").nth(1).unwrap();
        let container = container.split("        - name: ").next().unwrap();
        container.lines().filter_map(|line| line.trim().strip_prefix("- --")).collect()
    }

    fn parse(manifest: &str) -> DriverOptions {
        let words = arguments(manifest).into_iter().map(|word| format!("--{word}"));
        DriverOptions::try_parse_from(["tenmil-csi".to_owned()].into_iter().chain(words)).unwrap()
    }

    #[test]
    fn manifests_have_options_of_the_driver_and_its_name() {
        let (controller, node) = (parse(CONTROLLER), parse(NODE));
        assert!(controller.controller && !controller.node && node.node && !node.controller);
        for options in [controller, node] {
            assert_eq!(options.socket_path().unwrap().to_str(), Some("/csi/csi.sock"));
        }
        assert!(NODE.contains(&format!("/var/lib/kubelet/plugins/{DRIVER_NAME}/csi.sock")));
        assert!(DRIVER.contains(&format!("  name: {DRIVER_NAME}\n")));
        assert_eq!(CLASSES.matches(DRIVER_NAME).count(), 2);
    }

    #[test]
    fn endpoint_and_topology_have_one_form() {
        let parse =
            |words: &[&str]| DriverOptions::try_parse_from([&["tenmil-csi"], words].concat());
        let path = |text: &str| parse(&["--endpoint", text]).unwrap().socket_path();
        assert!(path("unix:///a/b").is_ok() && path("/a/b").is_ok());
        assert!(path("tcp://127.0.0.1:1").is_err() && path("a").is_err());
        assert!(parse(&["--topology", "zone=a"]).is_ok());
        assert!(parse(&["--topology", "zone"]).is_err());
        assert!(parse(&["--self-test", "/mnt", "--node"]).is_err());
    }
}
