//! `tenmil store set`.

use std::str::FromStr;

use block::Opener;
use block::store::{DeviceInfo, OpenStore, Place};
use block::uri::Uri;
use clap::Args;
use control::orders::{Order, device as told_of};
use serde_json::{Value, json};

use super::super::hand::Hand;
use crate::Refused;

#[derive(Debug, Args)]
pub(super) struct SetArguments {
    /// The device that the store is on
    #[arg(value_name = "URI")]
    device: Uri,

    /// Tell when so many per cent of its room are taken, such as 80,95; or none
    #[arg(
        long,
        value_name = "PERCENT,PERCENT",
        required_unless_present = "moved",
        conflicts_with = "moved"
    )]
    thresholds: Option<Thresholds>,

    /// Device N of the store is at URI now; may be given several times
    #[arg(id = "moved", long = "device", value_name = "N=URI")]
    moved: Vec<Moved>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// One threshold, two, or none.
#[derive(Clone, Copy, Debug)]
struct Thresholds([u8; 2]);

/// A device, and where it is.
#[derive(Clone, Debug)]
struct Moved(u32, Uri);

impl FromStr for Moved {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse =
            || format!("`{text}`, expected the number of a device from 1 on, as in 1=file:/b");
        let (number, uri) = text.split_once('=').ok_or_else(refuse)?;
        let number = number.parse().ok().filter(|number| *number > 0).ok_or_else(refuse)?;
        Ok(Self(number, uri.parse::<Uri>().map_err(|error| error.to_string())?))
    }
}

impl FromStr for Thresholds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || format!("`{text}`, expected one or two per cent from 1 to 100, or none");
        let percent = |text: &str| {
            text.parse().ok().filter(|percent| (1..=100).contains(percent)).ok_or_else(refuse)
        };
        Ok(Self(match text.split_once(',') {
            None if text == "none" => [0, 0],
            None => [percent(text)?, 0],
            Some((low, high)) => [percent(low)?, percent(high)?],
        }))
    }
}

/// Gives a store other thresholds, unless it has these, or writes down where its devices are.
pub(super) fn set(opener: &Opener<'_>, arguments: &SetArguments) -> Result<String, Refused> {
    let SetArguments { device, thresholds, moved, json } = arguments;
    let Some(Thresholds(percent)) = thresholds else {
        return set_places(opener, device, moved, *json);
    };
    let mut hand = Hand::on(opener, &Place::of(device)?)?;
    let told = hand.order(&Order::Thresholds { percent: *percent })?;
    if !json {
        return Ok(told.text + &hand.by());
    }
    let store = told.settings.unwrap_or_default();
    let member = |name: &str| store.get(name).cloned().unwrap_or(Value::Null);
    let document = json!({
        "name": member("name"),
        "changed": told.is_changed,
        "thresholds_percent": member("thresholds_percent"),
        "process": hand.pid(),
    });
    Ok(format!("{document:#}\n"))
}

/// Writes down where devices are, if that is not where they were.
fn set_places(
    opener: &Opener<'_>,
    device: &Uri,
    moved: &[Moved],
    json: bool,
) -> Result<String, Refused> {
    let mut place = Place::of(device)?;
    place.moved = moved.iter().map(|Moved(number, uri)| (*number, uri.clone())).collect();
    match Hand::elsewhere_or(opener, &place, OpenStore::open)? {
        Ok(open) => set_places_here(&open, moved, json),
        Err(mut hand) => set_places_there(&mut hand, moved, json),
    }
}

/// Has the process that has the store write it down.
fn set_places_there(hand: &mut Hand<'_>, moved: &[Moved], json: bool) -> Result<String, Refused> {
    let (mut text, mut is_changed, mut store) = (String::new(), false, Value::Null);
    for Moved(number, uri) in moved {
        let told = hand.order(&Order::Device { number: *number, uri: uri.clone() })?;
        text += &told.text;
        is_changed |= told.is_changed;
        store = told.settings.unwrap_or_default();
    }
    if json {
        let (name, devices) = (&store["name"], &store["devices"]);
        let document = json!({
            "name": name, "changed": is_changed, "devices": devices, "process": hand.pid(),
        });
        return Ok(format!("{document:#}\n"));
    }
    Ok(text + &hand.by())
}

fn set_places_here(open: &OpenStore, moved: &[Moved], json: bool) -> Result<String, Refused> {
    let (there, name) = (open.devices(), open.name());
    let unknown = |Moved(number, _): &&Moved| !there.iter().any(|one| one.number == *number);
    if let Some(Moved(number, _)) = moved.iter().find(unknown) {
        let last = there.len() - 1;
        let text = format!("store `{name}`: it has no device {number}, expected {last} at most");
        return Err(Refused::caller(text));
    }
    let is_changed = open.note_places()?;
    if json {
        let devices: Vec<Value> = there.iter().map(told_of).collect();
        let document = json!({
            "name": name, "changed": is_changed, "devices": devices, "process": null,
        });
        return Ok(format!("{document:#}\n"));
    }
    let already = if is_changed { "" } else { " already" };
    let line = |device: &DeviceInfo| {
        format!("device {} of store `{name}` is at {}{already}\n", device.number, device.uri)
    };
    let named =
        |device: &&DeviceInfo| moved.iter().any(|Moved(number, _)| *number == device.number);
    Ok(there.iter().filter(named).map(line).collect())
}
