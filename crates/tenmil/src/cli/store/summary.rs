//! What a store is and how its room is used: `tenmil store open` and `list`.

use block::Opener;
use block::store::{OpenStore, PAGE_BYTES, Place};
use block::uri::Uri;
use clap::Args;
use serde_json::{Value, json};

use super::{size, table};
use crate::Refused;

#[derive(Debug, Args)]
pub(super) struct ListArguments {
    /// The devices that the stores are on
    #[arg(value_name = "URI", required = true, num_args = 1..)]
    devices: Vec<Uri>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What is told of a store.
pub(super) struct Summary {
    uri: String,
    name: String,
    uuid: u128,
    generation: u64,
    volumes: u64,
    bytes: u64,
    used: u64,
    free: u64,
    reserved: u64,
    /// How much of that is for thick volumes.
    reserved_for_thick: u64,
    thresholds: [u8; 2],
    /// What all volumes have written, each for itself.
    written: u64,
    /// What all volumes could write: the sum of their sizes, snapshots left out.
    promised: u64,
}

impl Summary {
    pub(super) fn of(opener: &Opener<'_>, device: &Uri) -> Result<Self, Refused> {
        let place = Place::of(device)?;
        let open = OpenStore::open(opener, &place)?;
        let none = || Refused::peer(format!("{device}: the store does not say how it is used"));
        let usage = open.usage()?.ok_or_else(none)?;
        let volumes = open.list()?;
        let bytes = |blocks: u64| blocks * u64::from(PAGE_BYTES);
        let promised = volumes.iter().filter(|info| !info.is_read_only).map(|info| info.blocks);
        Ok(Self {
            uri: place.store.to_string(),
            name: open.name(),
            uuid: open.uuid(),
            generation: open.generation(),
            volumes: usage.volumes,
            bytes: bytes(usage.blocks),
            used: bytes(usage.used),
            free: bytes(usage.free),
            reserved: bytes(usage.kept + usage.promised),
            reserved_for_thick: bytes(usage.promised),
            thresholds: usage.thresholds,
            written: volumes.iter().map(|info| bytes(info.mapped)).sum(),
            promised: bytes(promised.sum()),
        })
    }

    pub(super) fn as_text(&self) -> String {
        let Self { uri, name, uuid, generation, volumes, .. } = self;
        format!(
            "store `{name}` on {uri}\n  uuid {uuid:032x}, generation {generation}\n  \
             {volumes} volumes and snapshots\n  {} in all, {} used, {} free, of which {} are \
             reserved for deletions and commits, and {} of that for thick volumes\n  {} written by all of them, each for itself; \
             {} promised to those that can be written\n  it is told when {} of its room are taken\n",
            size(self.bytes),
            size(self.used),
            size(self.free),
            size(self.reserved),
            size(self.reserved_for_thick),
            size(self.written),
            size(self.promised),
            percents(self.thresholds),
        )
    }

    pub(super) fn as_json(&self) -> Value {
        json!({
            "uri": self.uri,
            "name": self.name,
            "uuid": format!("{:032x}", self.uuid),
            "generation": self.generation,
            "volumes": self.volumes,
            "size_bytes": self.bytes,
            "used_bytes": self.used,
            "free_bytes": self.free,
            "reserved_bytes": self.reserved,
            "reserved_for_thick_bytes": self.reserved_for_thick,
            "written_bytes": self.written,
            "promised_bytes": self.promised,
            "thresholds_percent": self.thresholds.iter().filter(|one| **one > 0).collect::<Vec<_>>(),
        })
    }
}

/// `80 % and 95 %`.
pub(super) fn percents(thresholds: [u8; 2]) -> String {
    let set = thresholds.into_iter().filter(|percent| *percent > 0);
    let each: Vec<String> = set.map(|percent| format!("{percent} %")).collect();
    if each.is_empty() { "no part".into() } else { each.join(" and ") }
}

/// Says of several stores what they are, a line each.
pub(super) fn list(opener: &Opener<'_>, list: &ListArguments) -> Result<String, Refused> {
    let of = |device: &Uri| Summary::of(opener, device);
    let summaries: Vec<Summary> = list.devices.iter().map(of).collect::<Result<_, _>>()?;
    Ok(if list.json { list_json(&summaries) } else { list_text(&summaries) })
}

fn list_text(summaries: &[Summary]) -> String {
    let head =
        ["store", "size", "used", "free", "written", "promised", "volumes", "on"].map(String::from);
    let row = |one: &Summary| {
        let [bytes, used, free] = [one.bytes, one.used, one.free].map(size);
        let [written, promised] = [one.written, one.promised].map(size);
        let (name, volumes, uri) = (one.name.clone(), one.volumes.to_string(), one.uri.clone());
        [name, bytes, used, free, written, promised, volumes, uri]
    };
    table(&[&[head][..], &summaries.iter().map(row).collect::<Vec<_>>()].concat())
}

fn list_json(summaries: &[Summary]) -> String {
    let stores: Vec<Value> = summaries.iter().map(Summary::as_json).collect();
    format!("{:#}\n", json!({ "stores": stores }))
}
