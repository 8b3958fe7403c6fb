//! `tenmil store set`.

use std::str::FromStr;

use block::Opener;
use block::store::Place;
use block::uri::Uri;
use clap::Args;
use control::orders::Order;
use serde_json::{Value, json};

use super::super::hand::Hand;
use crate::Refused;

#[derive(Debug, Args)]
pub(super) struct SetArguments {
    /// The device that the store is on
    #[arg(value_name = "URI")]
    device: Uri,

    /// Tell when so many per cent of its room are taken, such as 80,95; or none
    #[arg(long, value_name = "PERCENT,PERCENT")]
    thresholds: Thresholds,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// One threshold, two, or none.
#[derive(Clone, Copy, Debug)]
struct Thresholds([u8; 2]);

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

/// Gives a store other thresholds, unless it has these.
pub(super) fn set(opener: &Opener<'_>, arguments: &SetArguments) -> Result<String, Refused> {
    let SetArguments { device, thresholds: Thresholds(percent), json } = arguments;
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
