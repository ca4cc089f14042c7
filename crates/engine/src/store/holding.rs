//! A region that is either here or away with a copy.

use std::sync::Arc;

use crate::device::{Completion, Ticket};
use crate::error::Result;
use crate::host::Region;

/// Here, or away with a ticket. Between two states only inside the methods below.
#[derive(Debug)]
pub struct Holding(Option<State>);

#[derive(Debug)]
enum State {
    Here(Region),
    Away(Ticket),
}

impl From<Region> for Holding {
    fn from(region: Region) -> Self {
        Holding(Some(State::Here(region)))
    }
}

impl Holding {
    /// The region, waiting for the copy that has it. After a failed copy the region is here again, and
    /// the failure is told once.
    pub fn region(&mut self) -> Result<&mut Region> {
        let (region, outcome) = self.settle();
        outcome.map(|()| region)
    }

    /// The region after the copy that has it, and how that went.
    pub fn settle(&mut self) -> (&mut Region, Result<()>) {
        let (region, outcome) = match self.0.take().expect("a holding is never empty") {
            State::Here(region) => (region, Ok(())),
            State::Away(ticket) => ticket.wait(),
        };
        match self.0.insert(State::Here(region)) {
            State::Here(region) => (region, outcome),
            State::Away(_) => unreachable!("just inserted"),
        }
    }

    /// Gives the region to a copy, after the copy before it.
    pub fn send(&mut self, copy: impl FnOnce(Region) -> Ticket) -> Result<Arc<dyn Completion>> {
        self.region()?;
        let Some(State::Here(region)) = self.0.take() else { unreachable!("`region` leaves it here") };
        let ticket = copy(region);
        let completion = ticket.completion();
        self.0 = Some(State::Away(ticket));
        Ok(completion)
    }
}
