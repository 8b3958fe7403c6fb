//! All scripted runs, by table.

mod registers;
mod completions;

use crate::scenario::Scenario;

/// Every scenario there is, in a fixed order.
pub fn all() -> Vec<Scenario> {
    [registers::table(), completions::table()].concat()
}

#[cfg(test)]
mod tests {
    #[test]
    fn look() {
        let filter = std::env::var("SIM").unwrap_or_default();
        for scenario in super::all() {
            if !scenario.name.contains(&filter) { continue; }
            let record = scenario.run();
            let again = scenario.run();
            println!("== {} {}", scenario.name, if record.hash == again.hash { "" } else { "NOT THE SAME" });
            match &record.failure {
                Some(failure) => { println!("   FAILURE {failure}"); if filter.len() > 0 { for line in &record.tail { println!("      {line}"); } println!("{:?}", record.told) } }
                None => println!("   ok {:?} {:?} lanes {} blocked {} deeds {} re {} longest {} told {:?} refused {:?}", record.state, record.counts, record.lanes, record.blocked, record.deeds, record.reattached, record.longest_answer, record.told, record.refused),
            }
        }
    }
}
