//! Discovery log page of a discovery service.

mod entry_uri;
mod watch;

use tenmil_wire::admin::GetLogPage;
use tenmil_wire::log::discovery::{DiscoveryEntry, DiscoveryHeader, discovery_entries};
use tenmil_wire::{Layout, TypedCommand, nqn};

pub use entry_uri::{security_name, transport_name, uri_of_entry};
pub use watch::{DiscoveryChange, DiscoveryWatch};

use tenmil_block::uri::{Uri, with_default_port};

use super::remote_admin::RemoteAdmin;
use super::tcp_uri::TcpUri;
use crate::identify::AdminAccess;
use tenmil_base::Error;

/// Contents of a discovery log page.
#[derive(Clone, Debug)]
pub struct DiscoveryLog {
    /// Generation counter, which is incremented with every change.
    pub generation: u64,
    /// Log page entries, one for each path to a subsystem.
    pub entries: Vec<DiscoveryEntry>,
}

/// Identifier of the discovery log page (Base 2.1 §5.1.12.3.1).
const PAGE: u8 = 0x70;
/// Entries read by one command, small enough for any MDTS.
const ENTRIES: u64 = 8;
/// Limit on the number of entries, against invalid data.
const ENTRIES_MAX: u64 = 65_536;
/// Attempts to read a page that changes in between.
const ATTEMPTS: u32 = 8;

/// Port of discovery services (TCP transport 1.1 §3.1.1).
const PORT: u16 = 8009;

/// Parses the URI of a discovery service: `tcp://HOST:PORT` or `tcp://HOST`, with the options of `tcp://` URIs.
pub fn parse_discovery_uri(text: &str) -> Result<TcpUri, Error> {
    let refuse = |problem: &str| {
        Error::usage(format!("discover {text}: {problem}, expected tcp://HOST:PORT"))
    };
    let rest = text.strip_prefix("tcp://").ok_or_else(|| refuse("no address"))?;
    let (address, query) = rest.split_once('?').unwrap_or((rest, ""));
    if address.is_empty() || address.contains('/') {
        return Err(refuse("no address"));
    }
    let addresses: Vec<String> =
        address.split(',').map(|address| with_default_port(address, PORT)).collect();
    let address = addresses.join(",");
    let mark = if query.is_empty() { "" } else { "?" };
    let uri: Uri = format!("tcp://{address}/{}{mark}{query}", nqn::DISCOVERY).parse()?;
    Ok(TcpUri::from_uri(&uri)?)
}

/// Connects to the discovery service that `name` names and reads its log page.
pub fn discover(name: &TcpUri) -> Result<DiscoveryLog, Error> {
    read_whole(&mut RemoteAdmin::connect(name)?)
}

/// Reads a consistent copy of the log page.
fn read_whole(service: &mut RemoteAdmin) -> Result<DiscoveryLog, Error> {
    for _ in 0..ATTEMPTS {
        let found = read(service)?;
        // The page was read in pieces: they belong together only if the generation has not changed.
        if header(service)?.genctr() == found.generation {
            return Ok(found);
        }
    }
    let address = service.address();
    Err(Error::remote(format!("discover tcp://{address}: it changed {ATTEMPTS} times meanwhile")))
}

fn read(service: &mut RemoteAdmin) -> Result<DiscoveryLog, Error> {
    let first = header(service)?;
    let count = first.numrec();
    if count > ENTRIES_MAX {
        let address = service.address();
        return Err(Error::remote(format!(
            "discover tcp://{address}: it has {count} entries, expected at most {ENTRIES_MAX}"
        )));
    }
    let mut found = Vec::new();
    while (found.len() as u64) < count {
        let at = found.len() as u64;
        let here = (count - at).min(ENTRIES);
        let len_bytes = u32::try_from(here * 1024).unwrap_or(1024);
        let mut page =
            DiscoveryHeader::zeroed().with(|header| header.numrec(here)).as_bytes().to_vec();
        page.extend(get(service, 1024 * (at + 1), len_bytes)?);
        found.extend(discovery_entries(&page));
    }
    Ok(DiscoveryLog { generation: first.genctr(), entries: found })
}

fn header(service: &mut RemoteAdmin) -> Result<DiscoveryHeader, Error> {
    let bytes = get(service, 0, 1024)?;
    DiscoveryHeader::parse(&bytes).map_err(|_| {
        let (address, count) = (service.address(), bytes.len());
        Error::remote(format!("discover tcp://{address}: {count} bytes received, expected 1024"))
    })
}

fn get(service: &mut RemoteAdmin, offset: u64, len_bytes: u32) -> Result<Vec<u8>, Error> {
    let log = GetLogPage { lpo: offset, ..GetLogPage::new(PAGE, len_bytes) };
    let completion = service.execute_admin(log.to_command(), len_bytes)?;
    if !completion.status.is_success() {
        let (status, address) = (completion.status, service.address());
        return Err(Error::remote(format!("discover tcp://{address}: Get Log Page: {status}")));
    }
    Ok(completion.bytes)
}
