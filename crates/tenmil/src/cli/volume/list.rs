//! `tenmil volume list`.

use block::Opener;
use block::store::{Account, Info, OpenStore, PAGE_BYTES, Place};
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
    Ok(if list.json { as_json(&volumes, &accounts) } else { as_text(&volumes, &accounts) })
}

fn as_text(volumes: &[Info], accounts: &[Account]) -> String {
    let head = ["volume", "size", "used", "shared", "unique", "reserved", "unit", "kind"];
    let head = head.map(String::from);
    let row = |(info, account): (&Info, &Account)| {
        let Account { used, shared, unique, reserved, .. } = *account;
        let of = origin(info, volumes).map(|name| format!(" of {name}")).unwrap_or_default();
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
        let kind = format!("{kind}{of}{sums}{thick}");
        [info.name.clone(), whole, used, shared, unique, reserved, unit, kind]
    };
    let rows: Vec<[String; 8]> = volumes.iter().zip(accounts).map(row).collect();
    table(&[&[head][..], &rows].concat())
}

/// Whether the promise of a thick volume holds: no first write to it finds the store full.
fn is_kept(info: &Info, account: &Account) -> Option<bool> {
    info.is_thick.then(|| account.own() == info.blocks)
}

fn as_json(volumes: &[Info], accounts: &[Account]) -> String {
    let page = u64::from(PAGE_BYTES);
    let one = |(info, account): (&Info, &Account)| {
        let mut one = described(info, volumes);
        one["shared_bytes"] = (account.shared * page).into();
        one["unique_bytes"] = (account.unique * page).into();
        one["reserved_bytes"] = (account.reserved * page).into();
        one["promise_kept"] = is_kept(info, account).into();
        one
    };
    let all: Vec<Value> = volumes.iter().zip(accounts).map(one).collect();
    format!("{:#}\n", json!({ "volumes": all }))
}
