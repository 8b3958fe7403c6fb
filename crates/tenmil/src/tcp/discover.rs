//! Asking a discovery service which subsystems there are.

use wire::admin::GetLogPage;
use wire::log::discovery::{DiscoveryEntry, DiscoveryHeader, entries};
use wire::{Layout, Typed, nqn};

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

/// Asks the discovery service at `address`, `HOST:PORT`.
pub(crate) fn discover(address: &str) -> Result<Discovered, Refused> {
    let mut service = AskedRemote::call(&TcpName::at(address, nqn::DISCOVERY))?;
    for _ in 0..ATTEMPTS {
        let found = read(&mut service, address)?;
        // What was read in pieces is whole only if nothing has changed meanwhile.
        if header(&mut service, address)?.genctr() == found.generation {
            return Ok(found);
        }
    }
    Err(Refused::peer(format!("discover tcp://{address}: it changed {ATTEMPTS} times meanwhile")))
}

fn read(service: &mut AskedRemote, address: &str) -> Result<Discovered, Refused> {
    let first = header(service, address)?;
    let count = first.numrec();
    if count > ENTRIES_MAX {
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
        page.extend(get(service, address, 1024 * (at + 1), len_bytes)?);
        found.extend(entries(&page));
    }
    Ok(Discovered { generation: first.genctr(), entries: found })
}

fn header(service: &mut AskedRemote, address: &str) -> Result<DiscoveryHeader, Refused> {
    let bytes = get(service, address, 0, 1024)?;
    DiscoveryHeader::parse(&bytes).map_err(|_| {
        Refused::peer(format!(
            "discover tcp://{address}: {} bytes came, expected 1024",
            bytes.len()
        ))
    })
}

fn get(
    service: &mut AskedRemote,
    address: &str,
    offset: u64,
    len_bytes: u32,
) -> Result<Vec<u8>, Refused> {
    let log = GetLogPage { lpo: offset, ..GetLogPage::new(PAGE, len_bytes) };
    let answer = service.admin(log.to_command(), len_bytes)?;
    if !answer.status.is_success() {
        let status = answer.status;
        return Err(Refused::peer(format!("discover tcp://{address}: Get Log Page: {status}")));
    }
    Ok(answer.bytes)
}
