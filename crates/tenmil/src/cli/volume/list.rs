//! `tenmil volume list`.

use block::Opener;
use block::store::{Account, Info, OpenStore, PAGE_BYTES, Parent, Place};
use block::uri::Uri;
use clap::Args;
use serde_json::{Value, json};

use super::super::store::{size, table};
use super::said::{described, origin};
use crate::Refused;

#[derive(Debug, Args)]
pub(super) struct ListArguments {
    /// The store: the device that it is on
    #[arg(value_name = "URI")]
    store: Uri,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// All volumes, and how much room each takes.
pub(super) fn list(opener: &Opener<'_>, list: &ListArguments) -> Result<String, Refused> {
    let open = OpenStore::open(opener, &Place::of(&list.store)?)?;
    let volumes = open.list()?;
    let accounts = volumes.iter().map(|info| open.account(&info.name));
    let accounts: Vec<Account> = accounts.collect::<Result<_, _>>()?;
    let parents = volumes.iter().map(|info| open.parent(info));
    let parents: Vec<Option<Parent>> = parents.collect::<Result<_, _>>()?;
    let rows: Vec<Row<'_>> = volumes
        .iter()
        .zip(&accounts)
        .zip(&parents)
        .map(|((info, account), parent)| Row { info, account, parent: parent.as_ref() })
        .collect();
    Ok(if list.json { as_json(&volumes, &rows) } else { as_text(&volumes, &rows) })
}

/// What is told of a volume.
struct Row<'a> {
    info: &'a Info,
    account: &'a Account,
    parent: Option<&'a Parent>,
}

fn as_text(volumes: &[Info], rows: &[Row<'_>]) -> String {
    let head = ["volume", "size", "used", "shared", "unique", "reserved", "unit", "kind"];
    let head = head.map(String::from);
    let row = |Row { info, account, parent }: &Row<'_>| {
        let Account { used, shared, unique, reserved, .. } = **account;
        let of = origin(info, volumes).map(|name| format!(" of {name}")).unwrap_or_default();
        let over = parent.map(|parent| format!(" over {}", parent.uri)).unwrap_or_default();
        let kind = match (info.is_read_only, info.origin) {
            (true, _) => "snapshot",
            (false, 0) => "volume",
            (false, _) => "clone",
        };
        let sums = if info.has_checksums { ", checksums" } else { "" };
        let thick = match is_kept(info, account) {
            None => "",
            Some(true) => ", thick",
            Some(false) => ", thick: inflate it again",
        };
        let [whole, used, shared, unique, reserved, unit] =
            [info.blocks, used, shared, unique, reserved, info.unit]
                .map(|blocks| size(blocks * u64::from(PAGE_BYTES)));
        let kind = format!("{kind}{of}{over}{sums}{thick}");
        [info.name.clone(), whole, used, shared, unique, reserved, unit, kind]
    };
    let rows: Vec<[String; 8]> = rows.iter().map(row).collect();
    table(&[&[head][..], &rows].concat())
}

/// Whether the promise of a thick volume holds: no first write to it finds the store full.
fn is_kept(info: &Info, account: &Account) -> Option<bool> {
    info.is_thick.then(|| account.own() == info.blocks)
}

fn as_json(volumes: &[Info], rows: &[Row<'_>]) -> String {
    let page = u64::from(PAGE_BYTES);
    let one = |Row { info, account, parent }: &Row<'_>| {
        let mut one = described(info, volumes, *parent);
        one["shared_bytes"] = (account.shared * page).into();
        one["unique_bytes"] = (account.unique * page).into();
        one["reserved_bytes"] = (account.reserved * page).into();
        one["promise_kept"] = is_kept(info, account).into();
        one
    };
    let all: Vec<Value> = rows.iter().map(one).collect();
    format!("{:#}\n", json!({ "volumes": all }))
}
