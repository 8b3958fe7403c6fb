//! Exports: the devices that a server offers, their listen addresses and allowed hosts.

mod nbd_tls;

use std::collections::BTreeSet;

use tenmil_base::Error;

use crate::device::Device;

pub use self::nbd_tls::NbdTls;

/// What a server offers, for [`Runtime::serve`](crate::Runtime::serve): namespaces of one NVMe subsystem
/// over NVMe/TCP, or a device over NBD.
///
/// An export shares the opening of its [`Device`]: the claim is that of the device, so a device that is
/// open [`ReadOnly`](crate::Access::ReadOnly) is exported read-only, and one that is open
/// [`ReadWrite`](crate::Access::ReadWrite) or [`Exclusive`](crate::Access::Exclusive) may be written by
/// clients, and by the program beside them if it keeps a clone. Other openings are refused as before,
/// also after the program has dropped its handles: the device stays open until the server is stopped.
///
/// ```
/// use tenmil::{Access, Export, Runtime};
///
/// # fn main() -> Result<(), tenmil::Error> {
/// let rt = Runtime::new()?;
/// rt.block_on(async {
///     let fast = rt.open("ram:16m", Access::ReadWrite).await?;
///     let safe = rt.open("null:?size=1g", Access::ReadOnly).await?;
///     let export = Export::nvme_tcp("127.0.0.1:0")
///         .nqn("nqn.2014-08.org.example:disks")
///         .allow_host("nqn.2014-08.org.example:client")
///         .namespace(fast)
///         .namespace(safe);
///     let server = rt.serve(export).await?;
///     assert!(server.uris()[1].ends_with("/nqn.2014-08.org.example:disks?ns=2"));
///     Ok(())
/// })
/// # }
/// ```
#[derive(Debug)]
#[must_use = "an export does nothing before `Runtime::serve`"]
pub struct Export {
    pub(crate) address: String,
    pub(crate) kind: ExportKind,
    /// Any client of another machine may connect.
    pub(crate) allows_any: bool,
    /// The first call that does not belong to its protocol, as an error.
    misuse: Option<&'static str>,
}

/// Export of one protocol.
#[derive(Debug)]
pub(crate) enum ExportKind {
    NvmeTcp(NvmeTcpExport),
    Nbd(NbdExport),
}

/// Device to export over NBD.
#[derive(Debug, Default)]
pub(crate) struct NbdExport {
    /// With the names that clients select them by: one is served.
    pub(crate) devices: Vec<(String, Device)>,
    pub(crate) tls: Option<NbdTls>,
}

/// Subsystem to export.
#[derive(Debug)]
pub(crate) struct NvmeTcpExport {
    pub(crate) nqn: String,
    pub(crate) namespaces: Vec<Device>,
    /// Allowed hosts; empty if any may connect.
    pub(crate) hosts: BTreeSet<String>,
}

/// NQN of a subsystem without another one: that of `tenmil serve`.
const NQN: &str = "nqn.2026-01.org.tenmil:disk";

impl Export {
    /// A subsystem over NVMe/TCP at `address`, an IP address with a port: `"127.0.0.1:4420"`,
    /// `"[::1]:0"`. Port 0 selects a free port.
    ///
    /// An address of other than loopback needs [`allow_host`](Self::allow_host) or
    /// [`allow_any_host`](Self::allow_any_host): NVMe/TCP has no authentication here.
    ///
    /// ```
    /// # use tenmil::{Access, Export, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// # let dev = rt.open("ram:16m", Access::ReadWrite).await?;
    /// let export = Export::nvme_tcp("127.0.0.1:0").namespace(dev);
    /// let server = rt.serve(export).await?;
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub fn nvme_tcp(address: impl Into<String>) -> Self {
        let export =
            NvmeTcpExport { nqn: NQN.to_owned(), namespaces: Vec::new(), hosts: BTreeSet::new() };
        Self::new(address.into(), ExportKind::NvmeTcp(export))
    }

    /// A device over NBD at `address`: the path of a Unix socket that begins with `/` or `./`, or an IP
    /// address with a port. [`device`](Self::device) adds the device. Another address than loopback
    /// needs a device that is open read-only, [TLS](Self::nbd_tls) that authenticates clients, or
    /// [`allow_any_host`](Self::allow_any_host).
    ///
    /// ```no_run
    /// # use tenmil::{Access, Export, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// # let dev = rt.open("ram:16m", Access::ReadWrite).await?;
    /// let export = Export::nbd("/tmp/disk.sock").device("disk", dev);
    /// let server = rt.serve(export).await?;
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub fn nbd(address: impl Into<String>) -> Self {
        Self::new(address.into(), ExportKind::Nbd(NbdExport::default()))
    }

    const fn new(address: String, kind: ExportKind) -> Self {
        Self { address, kind, allows_any: false, misuse: None }
    }

    /// Adds a namespace, over NVMe/TCP; they are numbered from 1.
    ///
    /// ```
    /// # use tenmil::{Access, Export, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// # let dev = rt.open("ram:16m", Access::ReadWrite).await?;
    /// let second = rt.open("null:", Access::ReadOnly).await?;
    /// let export = Export::nvme_tcp("127.0.0.1:0").namespace(dev).namespace(second);
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub fn namespace(mut self, device: Device) -> Self {
        match &mut self.kind {
            ExportKind::NvmeTcp(export) => export.namespaces.push(device),
            ExportKind::Nbd(_) => {
                self.record_error("a namespace was added, expected a device with a name")
            }
        }
        self
    }

    /// Adds the device, over NBD, with the name that clients select it by.
    ///
    /// ```
    /// # use tenmil::{Access, Export, Runtime};
    /// # fn main() -> Result<(), tenmil::Error> {
    /// # let rt = Runtime::new()?;
    /// # rt.block_on(async {
    /// # let dev = rt.open("ram:16m", Access::ReadWrite).await?;
    /// let export = Export::nbd("127.0.0.1:0").device("disk", dev);
    /// let server = rt.serve(export).await?;
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub fn device(mut self, name: &str, device: Device) -> Self {
        match &mut self.kind {
            ExportKind::Nbd(export) => export.devices.push((name.to_owned(), device)),
            ExportKind::NvmeTcp(_) => {
                self.record_error("a named device was added, expected a namespace")
            }
        }
        self
    }

    /// NQN of the subsystem, over NVMe/TCP. The default is `nqn.2026-01.org.tenmil:disk`.
    ///
    /// ```
    /// use tenmil::Export;
    ///
    /// let export = Export::nvme_tcp("127.0.0.1:0").nqn("nqn.2014-08.org.example:disk");
    /// ```
    pub fn nqn(mut self, nqn: &str) -> Self {
        match &mut self.kind {
            ExportKind::NvmeTcp(export) => nqn.clone_into(&mut export.nqn),
            ExportKind::Nbd(_) => self.record_error("an NQN was set, expected none"),
        }
        self
    }

    /// Adds the NQN of a host that may connect, over NVMe/TCP. Without any, every host may.
    ///
    /// ```
    /// use tenmil::Export;
    ///
    /// let export = Export::nvme_tcp("0.0.0.0:4420").allow_host("nqn.2014-08.org.example:client");
    /// ```
    pub fn allow_host(mut self, nqn: &str) -> Self {
        match &mut self.kind {
            ExportKind::NvmeTcp(export) => {
                export.hosts.insert(nqn.to_owned());
            }
            ExportKind::Nbd(_) => self.record_error("a host NQN was allowed, expected none"),
        }
        self
    }

    /// Sets TLS, over NBD.
    ///
    /// ```
    /// use tenmil::{Export, NbdTls};
    ///
    /// let tls = NbdTls::new().psk("alice", &[7; 32]);
    /// let export = Export::nbd("0.0.0.0:10809").nbd_tls(tls);
    /// ```
    pub fn nbd_tls(mut self, tls: NbdTls) -> Self {
        match &mut self.kind {
            ExportKind::Nbd(export) => export.tls = Some(tls),
            ExportKind::NvmeTcp(_) => self.record_error("TLS of NBD was set, expected none"),
        }
        self
    }

    /// Lets every client that reaches the address connect, also from other machines. Excludes
    /// [`allow_host`](Self::allow_host).
    ///
    /// ```
    /// use tenmil::Export;
    ///
    /// let export = Export::nvme_tcp("0.0.0.0:4420").allow_any_host();
    /// ```
    pub fn allow_any_host(mut self) -> Self {
        self.allows_any = true;
        self
    }

    fn record_error(&mut self, text: &'static str) {
        self.misuse.get_or_insert(text);
    }

    /// The protocol and the address, for messages.
    pub(crate) fn protocol_and_address(&self) -> String {
        let protocol = match self.kind {
            ExportKind::NvmeTcp(_) => "NVMe/TCP",
            ExportKind::Nbd(_) => "NBD",
        };
        format!("{protocol} at {}", self.address)
    }

    /// Refuses an export with a property that its protocol does not have.
    pub(crate) fn validate(&self) -> Result<(), Error> {
        let both = "hosts are allowed by name and any host is allowed, expected one of them";
        let is_both = match &self.kind {
            ExportKind::NvmeTcp(export) => self.allows_any && !export.hosts.is_empty(),
            ExportKind::Nbd(_) => false,
        };
        let misuse = self.misuse.or(is_both.then_some(both));
        misuse.map_or(Ok(()), |text| Err(Error::usage(text)))
    }
}
