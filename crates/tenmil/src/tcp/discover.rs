//! Asking a discovery service which subsystems there are.

mod watch;

pub(crate) use watch::{Change, Watch};
use wire::admin::GetLogPage;
use wire::log::discovery::{DiscoveryEntry, DiscoveryHeader, entries};
use wire::{Layout, Typed, nqn};

use block::uri::Uri;

use super::ask::AskedRemote;
use super::name::TcpName;
use crate::Refused;
use crate::identify::Controller;

/// What a discovery service has said.
#[derive(Clone, Debug)]
pub(crate) struct Discovered {
    /// It grows with every change.
    pub(crate) generation: u64,
    /// Each way to a subsystem.
    pub(crate) entries: Vec<DiscoveryEntry>,
}

/// The discovery log page (Base 2.1 §5.1.12.3.1).
const PAGE: u8 = 0x70;
/// Entries that are asked for at a time: the least that a controller sends which has a limit (MDTS).
const ENTRIES: u64 = 8;
/// Entries that are believed.
const ENTRIES_MAX: u64 = 65_536;
/// Times that a page which changes meanwhile is read again.
const ATTEMPTS: u32 = 8;

/// The discovery service that `text` names: `tcp://HOST:PORT`, and what else a `tcp://` URI may say.
pub(crate) fn service(text: &str) -> Result<TcpName, Refused> {
    let refuse = |problem: &str| {
        Refused::caller(format!("discover {text}: {problem}, expected tcp://HOST:PORT"))
    };
    let rest = text.strip_prefix("tcp://").ok_or_else(|| refuse("no address"))?;
    let (address, query) = rest.split_once('?').unwrap_or((rest, ""));
    if address.is_empty() || address.contains('/') {
        return Err(refuse("no address"));
    }
    let mark = if query.is_empty() { "" } else { "?" };
    let uri: Uri = format!("tcp://{address}/{}{mark}{query}", nqn::DISCOVERY).parse()?;
    Ok(TcpName::of(&uri)?)
}

/// Asks the discovery service that `name` names.
pub(crate) fn discover(name: &TcpName) -> Result<Discovered, Refused> {
    read_whole(&mut AskedRemote::call(name)?)
}

/// Reads the page as it is at one time.
fn read_whole(service: &mut AskedRemote) -> Result<Discovered, Refused> {
    for _ in 0..ATTEMPTS {
        let found = read(service)?;
        // What was read in pieces is whole only if nothing has changed meanwhile.
        if header(service)?.genctr() == found.generation {
            return Ok(found);
        }
    }
    let address = service.address();
    Err(Refused::peer(format!("discover tcp://{address}: it changed {ATTEMPTS} times meanwhile")))
}

fn read(service: &mut AskedRemote) -> Result<Discovered, Refused> {
    let first = header(service)?;
    let count = first.numrec();
    if count > ENTRIES_MAX {
        let address = service.address();
        return Err(Refused::peer(format!(
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
        found.extend(entries(&page));
    }
    Ok(Discovered { generation: first.genctr(), entries: found })
}

fn header(service: &mut AskedRemote) -> Result<DiscoveryHeader, Refused> {
    let bytes = get(service, 0, 1024)?;
    DiscoveryHeader::parse(&bytes).map_err(|_| {
        let (address, count) = (service.address(), bytes.len());
        Refused::peer(format!("discover tcp://{address}: {count} bytes came, expected 1024"))
    })
}

fn get(service: &mut AskedRemote, offset: u64, len_bytes: u32) -> Result<Vec<u8>, Refused> {
    let log = GetLogPage { lpo: offset, ..GetLogPage::new(PAGE, len_bytes) };
    let answer = service.admin(log.to_command(), len_bytes)?;
    if !answer.status.is_success() {
        let (status, address) = (answer.status, service.address());
        return Err(Refused::peer(format!("discover tcp://{address}: Get Log Page: {status}")));
    }
    Ok(answer.bytes)
}
